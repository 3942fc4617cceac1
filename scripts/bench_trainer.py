#!/usr/bin/env python3
"""Trains a small GPT beside PyTorch eager: the same step, the same threads, in turn, medians.

    scripts/bench_trainer.py --trainer target/release/trainer --python PATH
    scripts/bench_trainer.py ... --dtype bf16 --threads 2 --runs 5

PATH is a Python that has torch 2.11, the version that the trainer is linked with. Each round runs
both. Rates are tokens a second, and tokens a second of CPU, which says more on a machine that others
use; the first step of a run is not counted. The corpus is random tokens: no rate depends on them.
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
from array import array

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / "trainer/benches/peers/gpt.py"
DUE = 1.15


def main():
    args = arguments()
    if not args.trainer.exists():
        sys.exit(f"{args.trainer}: not there; hint: cargo build --release --bin trainer")
    shape = {
        name: getattr(args, name)
        for name in ["layers", "hidden", "heads", "vocab", "seq_len", "micro", "steps", "threads"]
    }
    shape |= {"global": args.global_batch, "dtype": args.dtype}
    load = os.getloadavg()[0]
    print(f"{datetime.date.today()}, {shape}, medians of {args.runs}; load {load:.1f}")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench-trainer-"))
    try:
        corpus(folder / "corpus", shape)
        rates = [(ours(args, shape, folder), theirs(args, shape)) for _ in range(args.runs)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n| tokens a second | ours | PyTorch eager | ratio | due |\n|---|---|---|---|---|")
    for at, what in enumerate(["of the clock", "of CPU"]):
        mine = statistics.median(a[at] for a, _ in rates)
        peer = statistics.median(b[at] for _, b in rates)
        ratio = statistics.median(a[at] / b[at] for a, b in rates)
        print(f"| {what} | {mine:,.0f} | {peer:,.0f} | {ratio:.2f} | {DUE} |")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainer", type=pathlib.Path, default=ROOT / "target/release/trainer")
    parser.add_argument("--python", default=sys.executable, help="has torch")
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
    return parser.parse_args()


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
    """Tokens a second of the clock and of CPU; the start of the program is taken off."""
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
        run = {{ dir = '{folder}/run', budget = {{ steps = {steps} }}, threads = {threads} }}
        data = {{ train = '{folder}/corpus', split = [1, 0, 0], tokenizer = 'gpt2' }}
        batch = {{ global = {shape["global"]}, micro = {shape["micro"]} }}
        model = {{ layers = {shape["layers"]}, hidden = {shape["hidden"]}, heads = {shape["heads"]},
                   vocab = {shape["vocab"]}, seq_len = {shape["seq_len"]} }}
        precision = {{ dtype = '{shape["dtype"]}' }}
        optim = {{ lr = {{ peak = 1e-4 }} }}
        checkpoint = {{ every = {{ steps = 0 }} }}
        eval = {{ every = 0 }}
        log = {{ every = 1, tensorboard = false }}
        """.replace("\n                   ", " ")
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
    environment = os.environ | {"OMP_NUM_THREADS": str(shape["threads"])}
    command = [args.python, PEER, json.dumps(shape)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{PEER}: {done.stderr}")
    steps = json.loads(done.stdout)
    tokens = shape["global"] * shape["seq_len"]
    return tuple(tokens / statistics.median(steps[kind][1:]) for kind in ["wall", "cpu"])


main()
