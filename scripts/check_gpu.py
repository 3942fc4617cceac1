#!/usr/bin/env python3
"""Checks a trainer on a GPU of this machine: the same losses as on the CPU, resumed runs, ranks.

    scripts/check_gpu.py --trainer target/cuda/release/trainer
    scripts/check_gpu.py --trainer ... --device cpu       # a dry run of the checks themselves

One GPU is enough: several ranks share it, which NCCL accepts if each reports another host. Prints a
line per check, and exits with 1 if one fails. Models are small, data synthetic.
"""

import argparse
import array
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

VOCAB = 200
STEPS = 16
FAMILIES = {
    "gpt": {},
    "llama": {
        "model.positions": "'rope'",
        "model.norm": "'rmsnorm'",
        "model.activation": "'swiglu'",
        "model.bias": "false",
    },
    "t5": {"model.family": "'t5'", "model.dec_len": "16"},
    "bert": {"model.family": "'bert'"},
}
# Relative differences of the loss due to rounding: f32 sums in another order, and 8 or 11 bits of
# mantissa.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}


class Failed(Exception):
    """A check failed."""


class Lab:
    """A folder with corpora, vocabularies and runs."""

    def __init__(self, folder, trainer, device):
        self.folder, self.trainer, self.device = folder, trainer, device
        words = "[PAD] [CLS] [SEP] [MASK] [BOS] [EOS] [UNK] [EOD]".split()
        words += [str(i) if i < 10 or i % 3 else f"##{i}" for i in range(8, VOCAB - 30)]
        words += [f"<extra_id_{i}>" for i in range(30)]
        (folder / "words.txt").write_text("\n".join(words) + "\n")
        documents = [
            [[20 + (d % 7 + s + i * (1 + d % 2)) % 40 for i in range(9 + s)] for s in range(2 + d % 5)]
            for d in range(400)
        ]
        write_corpus(folder / "corpus", documents)

    def config(self, name, keys):
        """The config file of a run."""
        base = {
            "run.dir": f"'{self.folder}/{name}'",
            "run.budget": f"{{ steps = {STEPS} }}",
            "run.threads": "2",
            "data.train": f"'{self.folder}/corpus'",
            "data.tokenizer": f"'wordpiece:{self.folder}/words.txt'",
            "data.split": "'100,0,0'",
            "model.layers": "4",
            "model.hidden": "128",
            "model.heads": "4",
            "model.seq_len": "32",
            "model.vocab": str(VOCAB),
            "batch.global": "16",
            "batch.micro": "2",
            "optim.lr.peak": "1e-3",
            "precision.deterministic": "true",
            "eval.every": "0",
            "log.every": "1",
            "log.tensorboard": "false",
            "log.peak_flop_per_s": "1e15",
            "checkpoint.every.steps": "4",
        }
        path = self.folder / f"{name}.toml"
        path.write_text("".join(f"{key} = {value}\n" for key, value in (base | keys).items()))
        return path

    def start(self, config, device, rank=0, world=1, port=0):
        environment = os.environ | {"RUST_BACKTRACE": "0"}
        if world > 1:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                # As if each rank were on another machine: otherwise NCCL refuses two ranks on one GPU.
                "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket",
            }  # fmt: skip
        command = [self.trainer, "train", config, "--set", f"run.device='{device}'"]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def train(self, name, keys, device=None, world=1):
        """Trains to the end, and returns the loss of each step."""
        config = self.config(name, keys)
        port = free_port()
        ranks = [self.start(config, device or self.device, r, world, port) for r in range(world)]
        texts = [finish(rank) for rank in ranks]
        for rank, text in zip(ranks, texts):
            if rank.returncode != 0:
                raise Failed(f"{name}: exit {rank.returncode}: {text[-600:]}")
        return self.losses(name)

    def losses(self, name):
        lines = (self.folder / name / "log.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        return [step["loss"] for step in steps if "loss" in step]


def finish(rank, seconds=240):
    try:
        return rank.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        rank.kill()
        return f"killed: did not end within {seconds} s; " + rank.communicate()[1]


def write_corpus(prefix, documents):
    """Documents of sentences, as Megatron writes them with `--split-sentences`."""
    sentences = [sentence for document in documents for sentence in document]
    tokens = array.array("H", [token for sentence in sentences for token in sentence])
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    lengths, offsets, starts, at = [], [], [0], 0
    for sentence in sentences:
        lengths.append(len(sentence))
        offsets.append(at)
        at += 2 * len(sentence)
    for document in documents:
        starts.append(starts[-1] + len(document))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sentences), len(starts))
    tables = struct.pack(f"<{len(lengths)}i", *lengths)
    tables += struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(starts)}q", *starts)
    prefix.with_suffix(".idx").write_bytes(header + tables)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def compare_losses(found, expected, tolerance):
    """Fails if a relative difference exceeds `tolerance`."""
    if len(found) != len(expected) or not found:
        raise Failed(f"expected {len(expected)} losses, found {len(found)}")
    difference = max(abs(one / other - 1) for one, other in zip(found, expected))
    if difference > tolerance:
        raise Failed(f"losses differ by {difference:.2e}, expected at most {tolerance:.0e}")
    return f"losses within {difference:.1e}, from {found[0]:.3f} to {found[-1]:.3f}"


def check_family(lab, family, dtype):
    """The GPU's losses compared with those of the CPU in f32."""
    keys = FAMILIES[family]
    on_cpu = lab.train(f"{family}-{dtype}-cpu", keys, "cpu")
    on_gpu = lab.train(f"{family}-{dtype}", keys | {"precision.dtype": f"'{dtype}'"})
    return compare_losses(on_gpu, on_cpu, TOLERANCE[dtype])


def same_bits(lab, name, keys, other):
    """Two runs, the second with other keys, have bit-identical losses."""
    first = lab.train(f"{name}-1", keys)
    return compare_losses(lab.train(f"{name}-2", keys | other), first, 0)


def resumed(lab, name, keys):
    """A run that is killed and resumed has the losses of an uninterrupted one."""
    keys = keys | {"run.budget": f"{{ steps = {4 * STEPS} }}"}
    uninterrupted = lab.train(f"{name}-uninterrupted", keys)
    killed = lab.start(lab.config(f"{name}-killed", keys), lab.device)
    folder = lab.folder / f"{name}-killed" / "ckpt"
    deadline = time.monotonic() + 120
    while not list(folder.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.kill()
    text = killed.communicate()[1]
    steps = max((int(step.name[5:]) for step in folder.glob("step-*")), default=0)
    if not 0 < steps < 4 * STEPS:
        raise Failed(f"killed after a checkpoint of step {steps}: {text[-600:]}")
    resumed_run = lab.train(f"{name}-killed", keys)
    return f"killed after step {steps}, " + compare_losses(resumed_run, uninterrupted, 0)


def generated(lab):
    """Greedy generation returns the same text on GPU and CPU."""
    lab.train("generate", {})
    texts = []
    for device in ["cpu", lab.device]:
        config = lab.config(f"generate-{device}", {"run.device": f"'{device}'"})
        command = [lab.trainer, "generate", "--ckpt", lab.folder / "generate", "--config", config]
        command += ["--prompt", "20 22 23", "--tokens", "24", "--temperature", "0"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(done.stderr[-600:])
        texts.append(done.stdout)
    if texts[0] != texts[1]:
        raise Failed(f"expected {texts[0]!r}, found {texts[1]!r}")
    return f"{len(texts[0])} characters are equal"


def two_ranks(lab, name, parallel, keys, tolerance):
    """The losses of two ranks compared with those of one."""
    alone = lab.train(f"{name}-alone", keys)
    both = lab.train(name, keys | {f"parallel.{key}": value for key, value in parallel.items()}, world=2)
    return compare_losses(both, alone, tolerance)


def lost_rank(lab, how):
    """One of two ranks is killed or stopped: the other reports that rank and exits."""
    keys = {"run.budget": "{ steps = 100000 }", "parallel.timeout": "'8s'", "batch.global": "64"}
    name = f"lost-{how.name}"
    config, port = lab.config(name, keys), free_port()
    ranks = [lab.start(config, lab.device, rank, 2, port) for rank in range(2)]
    log = lab.folder / name / "log.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 20:
        if time.monotonic() > deadline or ranks[0].poll() is not None:
            for rank in ranks:
                rank.kill()
            raise Failed(f"no training steps: {ranks[0].communicate()[1][-600:]}")
        time.sleep(0.05)
    ranks[1].send_signal(how)
    start = time.monotonic()
    text = finish(ranks[0], 60)
    seconds = time.monotonic() - start
    ranks[1].kill()
    ranks[1].communicate()
    if ranks[0].returncode in (0, -signal.SIGKILL) or "rank 1" not in text and "ranks 1" not in text:
        raise Failed(f"exit {ranks[0].returncode} after {seconds:.1f} s: {text[-600:]}")
    return f"exit {ranks[0].returncode} after {seconds:.1f} s: {text.strip().splitlines()[-1]}"


def checks(lab):
    nvme = f"'nvme:{lab.folder}'"
    dropping = {"model.dropout": "0.1", "model.attention_dropout": "0.1"}
    recompute = {"parallel.recompute.mode": "'full'"}
    for family in FAMILIES:
        for dtype in TOLERANCE:
            name = f"{family}, {dtype}, compared with the CPU"
            yield name, lambda f=family, d=dtype: check_family(lab, f, d)
    bf16 = {"precision.dtype": "'bf16'"}
    yield "the same run twice", lambda: same_bits(lab, "twice", bf16 | dropping, {})
    yield "recompute", lambda: same_bits(lab, "recompute", bf16 | dropping, recompute)
    for place in ["'cpu'", nvme]:
        kept, moved = recompute | {"parallel.activation_offload": place}, {"optim.offload": place}
        label = place.strip("'").partition(":")[0]
        yield f"activations in {label}", lambda k=kept, n=label: same_bits(lab, f"kept-{n}", bf16, k)
        # The CPU's Adam rounds differently from the GPU's fused one.
        yield (
            f"optimizer state in {label}",
            lambda m=moved, n=label: compare_losses(
                lab.train(f"moved-{n}", bf16 | m), lab.train(f"unmoved-{n}", bf16), 1e-2
            ),
        )
    yield "killed and resumed", lambda: resumed(lab, "resumed", bf16 | dropping)
    yield "killed and resumed, state in cpu", lambda: resumed(
        lab, "resumed-cpu", bf16 | {"optim.offload": "'cpu'"}
    )
    yield "generation", lambda: generated(lab)
    layouts = {
        "dp 2": {},
        "dp 2, zero 1": {"zero": "1"},
        "dp 2, zero 2": {"zero": "2"},
        "dp 2, zero 3": {"zero": "3"},
        "tp 2": {"tp": "2"},
        "tp 2, sequence parallel": {"tp": "2", "sequence_parallel": "true"},
        "pp 2": {"pp": "2"},
        "pp 2, interleaved": {"pp": "2", "virtual_stages": "2", "schedule": "'interleaved'"},
    }
    for name, parallel in layouts.items():
        # Sums over two halves of a matrix round differently; all other sums are the same.
        tolerance = 1e-4 if "tp" in parallel else 0
        yield f"two ranks, {name}", lambda n=name, p=parallel, e=tolerance: two_ranks(
            lab, n.replace(" ", "-").replace(",", ""), p, {}, e
        )
    for how in [signal.SIGKILL, signal.SIGSTOP]:
        yield f"a rank gets {how.name}", lambda h=how: lost_rank(lab, h)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainer", type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="check-gpu-"))
    failed = 0

    def run(check):
        start = time.monotonic()
        try:
            outcome = "ok", check()
        except Failed as error:
            outcome = "FAILED", str(error)
        return *outcome, time.monotonic() - start

    try:
        lab = Lab(folder, args.trainer.resolve(), args.device)
        chosen = [(name, check) for name, check in checks(lab) if args.only in name]
        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = pool.map(run, [check for _, check in chosen])
            for (name, _), (word, text, seconds) in zip(chosen, outcomes):
                failed += word != "ok"
                print(f"{word:6} {name}: {text} ({seconds:.0f} s)", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(chosen) - failed} of {len(chosen)} checks pass")
    sys.exit(1 if failed or not chosen else 0)


main()
