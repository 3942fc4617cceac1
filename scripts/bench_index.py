#!/usr/bin/env python3
"""The GPT index compared with Megatron's helpers and numpy: the same documents, in turn, medians.

    scripts/bench_index.py [--documents 100000000] [--runs 5] [--python PYTHON]

Both build the document, sample and shuffle index of one epoch in memory, and must build equal arrays.
The documents are an .idx and a sparse .bin in a temporary folder: 2 GB for a hundred million. PYTHON
has the packages of scripts/bench_loader.txt; the default is that of .bench-venv-loader, which
scripts/bench_loader.py creates.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER = ROOT / "indexed/benches/peers/helpers.py"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", help="for the documents; default: the system's temporary folder")
    parser.add_argument("--python", default=ROOT / ".bench-venv-loader/bin/python")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as folder:
        cargo = ["cargo", "bench", "-q", "-p", "indexed", "--bench", "index", "--"]
        numbers = [str(args.documents), str(args.seq_length)]
        ours, theirs = [], []
        for _ in range(args.runs):
            ours.append(run(cargo + numbers + [folder]))
            theirs.append(run([args.python, PEER, f"{folder}/a", str(args.seq_length)]))
            if ours[-1]["md5"] != theirs[-1]["md5"]:
                sys.exit(f"the arrays differ: ours {ours[-1]['md5']}, theirs {theirs[-1]['md5']}")
    print(f"{datetime.date.today()}, {args.documents:,} documents, medians of {args.runs}, load "
          f"{os.getloadavg()[0]:.1f}\n\n| what | ours | theirs | ratio |\n|---|---|---|---|")
    for key, what in (("wall_s", "wall time"), ("cpu_s", "CPU time")):
        mine, other = (statistics.median(run[key] for run in side) for side in (ours, theirs))
        print(f"| {what} | {mine:.2f} s | {other:.2f} s | {other / mine:.2f} |")


def run(command):
    """The JSON object in the last line that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
