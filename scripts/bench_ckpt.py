#!/usr/bin/env python3
"""Saves and loads compared with torch, DCP, safetensors, DeepSpeed and fio: one state, in turn.

    make bench-ckpt ARGS="--folder /scratch --bytes 8GB"
    scripts/bench_ckpt.py --folder /scratch --bytes 2GB --runs 3 --python PATH

Each round saves the state of a GPT and its Adam by `feedline ckpt bench` and by every peer, each save
followed by fsync, and then loads it with the page cache dropped. Then it prints numbers without a peer:
the cost of checksums, the cost of committing 64 files, memory, and two, four and eight processes.

The peers are installed into .bench-venv-ckpt with the versions of scripts/bench_ckpt.txt. DeepSpeed's
FastFileWriter is measured where it can be built, with g++ and libaio's headers. fio must be installed.
A state of 8 GB takes 16 GB of memory while a peer loads it.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".bench-venv-ckpt"
FEEDLINE = ROOT / "target/release/feedline"
PEER = ROOT / "ckpt/benches/peers/state.py"
DEEPSPEED = "deepspeed==0.19.8"
UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
# The targets: Feedline's rate over that of the peer.
RATIO_MIN = {
    ("save", "torch"): 5,
    ("save", "dcp"): 5,
    ("save", "safetensors"): 5,
    ("save", "deepspeed"): 1,
    ("load", "torch"): 2.5,
    ("load", "dcp"): 3,
    ("load", "safetensors"): 1.1,
}


def main():
    args = arguments()
    if not args.feedline.exists():
        sys.exit(f"{args.feedline} does not exist (hint: cargo build --release -p tools)")
    python = venv(args.python)
    folder = args.folder / f".bench-peers-{os.getpid()}"
    print(f"{datetime.date.today()}, {args.bytes}, medians of {args.runs}; {load()} at the start")
    try:
        folder.mkdir(parents=True)
        rates = rounds(args, python, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n| what | ours GB/s | theirs GB/s | ratio | at least |\n|---|---|---|---|---|")
    for (action, kind), theirs in rates.items():
        if kind == "ours" or not theirs:
            continue
        ours = rates[action, "ours"]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs))
        ours, theirs = statistics.median(ours), statistics.median(theirs)
        target = RATIO_MIN.get((action, kind), 0.95)
        print(f"| {action}; {kind} | {ours / 1e9:.2f} | {theirs / 1e9:.2f} | {ratio:.2f} | {target} |")
    alone = feedline(args, "sums,commit,processes,save", args.runs)
    print(f"\nchecksums cost {100 * alone['sums_cost_ratio']:.1f} %; expected under 3 %")
    print(f"committing 64 files takes {alone['commit_64_files_ms']:.1f} ms; expected under 50 ms")
    over = (alone["staging_peak_bytes"] - alone["staging_bound_bytes"]) / 2**20
    print(f"memory over the staging bound: {over:.0f} MiB; expected under 32 MiB")
    for some in alone["processes"]:
        rate, share = some["median_bytes_per_s"] / 1e9, some["of_one"]
        print(f"{some['processes']} processes: {rate:.2f} GB/s, {share:.2f} of one; expected 1")
    print(f"{load()} at the end")


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="on the disk to measure")
    parser.add_argument("--bytes", default="8GB", help="of the state")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", default="torch,dcp,safetensors,deepspeed")
    parser.add_argument("--python", default=None, help="with the peers; default: .bench-venv-ckpt")
    parser.add_argument("--feedline", type=pathlib.Path, default=FEEDLINE)
    return parser.parse_args()


def rounds(args, python, folder):
    rates = {("save", "ours"): [], ("save", "fio"): [], ("load", "ours"): [], ("load", "fio"): []}
    peers = [kind for kind in args.peers.split(",") if kind]
    if "deepspeed" in peers and not imports(python, "deepspeed"):
        print("deepspeed: not installed; skipped")
        peers.remove("deepspeed")
    for _ in range(args.runs):
        report = feedline(args, "save,load", 1)
        measured = {one["what"]: one["median_bytes_per_s"] for one in report["rates"]}
        for key, what in {
            ("save", "ours"): "save, durable",
            ("save", "fio"): "fio write, direct",
            ("load", "ours"): "load, verified",
            ("load", "fio"): "fio read, direct",
        }.items():
            rates[key].extend([measured[what]] if what in measured else [])
        for kind in peers:
            path = folder / kind
            for action in ["save", "load"]:
                # Files of FastFileWriter are loaded by torch, which is measured separately.
                if (action, kind) == ("load", "deepspeed"):
                    continue
                one = peer(python, action, kind, path, size_of(args.bytes))
                rates.setdefault((action, kind), []).append(one["bytes"] / one["seconds"])
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return rates


def feedline(args, rows, runs):
    command = [args.feedline, "ckpt", "bench", args.folder, "--rows", rows, "--json"]
    return run([*command, "--bytes", args.bytes, "--rounds", str(runs)])


def peer(python, action, kind, path, size):
    return run([python, PEER, action, kind, path, "--bytes", str(size)])


def imports(python, module):
    done = subprocess.run([python, "-c", f"import {module}.io"], capture_output=True)
    return done.returncode == 0


def venv(python):
    if python:
        return python
    if not VENV.exists():
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        wanted = ["-r", ROOT / "scripts/bench_ckpt.txt"]
        subprocess.run([VENV / "bin/pip", "install", "-q", *wanted], check=True)
        # It is built with the installed PyTorch, and skipped if that fails.
        more = ["--no-build-isolation", DEEPSPEED]
        subprocess.run([VENV / "bin/pip", "install", "-q", *more], check=False)
    return VENV / "bin/python"


def size_of(text):
    unit = next((unit for unit in UNITS if text.endswith(unit)), None)
    if unit is None:
        sys.exit(f"--bytes {text}: expected a number and one of {', '.join(UNITS)}")
    return int(text.removesuffix(unit)) * UNITS[unit]


def load():
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"


def run(command):
    """The JSON object that a command prints last."""
    path = os.pathsep.join([str(pathlib.Path(command[0]).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr}")
    text = done.stdout.strip()
    return json.loads(text[text.index("{") :])


if __name__ == "__main__":
    main()
