#!/usr/bin/env python3
"""Trains a small GPT, compared with PyTorch eager: the same step and threads, in turn, medians.

    scripts/bench_trainer.py --trainer target/release/trainer --python PATH
    scripts/bench_trainer.py ... --dtype bf16 --threads 2 --runs 5
    scripts/bench_trainer.py ... --device cuda --dtype bf16 --preset 345m

PATH is a Python that has torch 2.11, the version that the trainer is linked with. Each round runs
both. Rates are tokens per second and tokens per CPU second, which is the number to use on a shared
machine; the first step of a run is not counted. The corpus is random tokens, which do not affect rates.
On a GPU, torch.compile is a second peer, three steps of each are not counted, and the GPU's memory is
the maximum that nvidia-smi reports, including caches of the allocator and the CUDA context.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
from array import array

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / "trainer/benches/peers/gpt.py"
RATIO_MIN = 1.15
PRESETS = {
    "345m": {"layers": 24, "hidden": 1024, "heads": 16, "seq_len": 1024, "micro": 16}
    | {"global_batch": 64, "steps": 12},
    "1.3b": {"layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "micro": 4}
    | {"global_batch": 32, "steps": 8},
}


def main():
    args = arguments()
    if not args.trainer.exists():
        sys.exit(f"{args.trainer} does not exist (hint: cargo build --release --bin trainer)")
    shape = {
        name: getattr(args, name)
        for name in ["layers", "hidden", "heads", "vocab", "seq_len", "micro", "steps", "threads"]
    }
    shape |= {"global": args.global_batch, "dtype": args.dtype, "device": args.device}
    load = os.getloadavg()[0]
    print(f"{datetime.date.today()}, {shape}, medians of {args.runs}; load {load:.1f}", flush=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench-trainer-"))
    try:
        corpus(folder / "corpus", shape)
        if args.device == "cuda":
            return on_gpu(args, shape, folder)
        rates = [(ours(args, shape, folder), theirs(args, shape)) for _ in range(args.runs)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n| tokens per second | ours | PyTorch eager | ratio | at least |\n|---|---|---|---|---|")
    for at, what in enumerate(["wall time", "CPU time"]):
        mine = statistics.median(a[at] for a, _ in rates)
        peer = statistics.median(b[at] for _, b in rates)
        ratio = statistics.median(a[at] / b[at] for a, b in rates)
        print(f"| {what} | {mine:,.0f} | {peer:,.0f} | {ratio:.2f} | {RATIO_MIN} |")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainer", type=pathlib.Path, default=ROOT / "target/release/trainer")
    parser.add_argument("--python", default=sys.executable, help="has torch")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the GPU, for MFU")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--preset", choices=PRESETS, help="a model and its batch")
    args = parser.parse_args()
    for name, value in PRESETS.get(args.preset, {}).items():
        setattr(args, name, value)
    return args


def on_gpu(args, shape, folder):
    """Steps of the trainer, of PyTorch eager and of torch.compile, in turn."""
    tokens = shape["global"] * shape["seq_len"]
    rows = {"ours": [], "PyTorch eager": [], "torch.compile": []}
    for _ in range(args.runs):
        for name, found in rows.items():
            with MemoryWatch() as memory:
                if name == "ours":
                    log = run(args, shape, folder, shape["steps"])[1]
                    wall = [tokens / step["perf"]["tokens_per_s"] for step in log]
                else:
                    wall = peer(args, shape | {"compile": name == "torch.compile"})["wall"]
            found.append((tokens / statistics.median(wall[3:]), memory.peak_mib))
            print(f"{name}: {found[-1][0]:,.0f} tokens/s, {found[-1][1]:,} MiB", flush=True)
    print("\n| | tokens/s | ratio of ours | MFU | GPU memory MiB |\n|---|---|---|---|---|")
    for name, found in rows.items():
        rate, memory = (statistics.median(each) for each in zip(*found))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(rows["ours"], found))
        mfu = rate * flop_per_token(shape) / args.peak
        print(f"| {name} | {rate:,.0f} | {ratio:.2f} | {100 * mfu:.1f} % | {memory:,.0f} |")


def flop_per_token(shape):
    """FLOP of the forward and backward pass, with half of the attention matrix (PaLM, appendix B)."""
    hidden, layers = shape["hidden"], shape["layers"]
    weights = 12 * layers * hidden * hidden + shape["vocab"] * hidden
    return 6 * weights + 6 * layers * hidden * shape["seq_len"]


class MemoryWatch(threading.Thread):
    """Queries nvidia-smi for the memory in use, ten times a second."""

    def __enter__(self):
        self.peak_mib, self.is_over = 0, threading.Event()
        self.start()
        return self

    def run(self):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.is_over.wait(0.1):
            text = subprocess.run(command, capture_output=True, text=True).stdout
            self.peak_mib = max(self.peak_mib, int(text.split()[0]))

    def __exit__(self, *_):
        self.is_over.set()
        self.join()


def corpus(prefix, shape):
    """One document of random tokens, as Megatron writes it."""
    count = (shape["steps"] + 4) * shape["global"] * shape["seq_len"] + 1
    source = random.Random(1)
    tokens = array("H", (source.randrange(min(shape["vocab"], 1 << 16)) for _ in range(count)))
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    tables = struct.pack("<iqqq", count, 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(header + tables)


def ours(args, shape, folder):
    """Tokens per second of wall and of CPU time, without the startup of the program."""
    long, log = run(args, shape, folder, shape["steps"])
    short, _ = run(args, shape, folder, 1)
    tokens = shape["global"] * shape["seq_len"]
    wall = [tokens / step["perf"]["tokens_per_s"] for step in log[1:]]
    return tokens / statistics.median(wall), tokens * (shape["steps"] - 1) / (long - short)


def run(args, shape, folder, steps):
    config = folder / "run.toml"
    threads = shape["threads"]
    config.write_text(
        f"""
        run = {{ dir = '{folder}/run', budget = {{ steps = {steps} }}, threads = {threads},
                 device = '{shape["device"]}' }}
        data = {{ train = '{folder}/corpus', split = [1, 0, 0], tokenizer = 'gpt2' }}
        batch = {{ global = {shape["global"]}, micro = {shape["micro"]} }}
        model = {{ layers = {shape["layers"]}, hidden = {shape["hidden"]}, heads = {shape["heads"]},
                   vocab = {shape["vocab"]}, seq_len = {shape["seq_len"]} }}
        precision = {{ dtype = '{shape["dtype"]}' }}
        optim = {{ lr = {{ peak = 1e-4 }} }}
        checkpoint = {{ every = {{ steps = 0, end = false }} }}
        eval = {{ every = 0 }}
        log = {{ every = 1, tensorboard = false, peak_flop_per_s = {args.peak} }}
        """.replace(",\n                 ", ", ")
    )
    shutil.rmtree(folder / "run", ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(shape["threads"])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [args.trainer, "train", config]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{args.trainer}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    return cpu, log


def theirs(args, shape):
    steps = peer(args, shape)
    tokens = shape["global"] * shape["seq_len"]
    return tuple(tokens / statistics.median(steps[kind][1:]) for kind in ["wall", "cpu"])


def peer(args, shape):
    environment = os.environ | {"OMP_NUM_THREADS": str(shape["threads"])}
    command = [args.python, PEER, json.dumps(shape)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{PEER}: {done.stderr}")
    return json.loads(done.stdout)


main()
