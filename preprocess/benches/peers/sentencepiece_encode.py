#!/usr/bin/env python3
"""Compares ids and speed of Feedline with those of SentencePiece's C++ library.

    sentencepiece_encode.py MODEL JSONL [--rounds 5] [--core 0]

Needs the package `sentencepiece`. Builds `benches/sentencepiece.rs` and runs it and the library in
turn, both pinned to one core. Only encoding is timed. Exits with 1 if an id differs.
"""

import argparse
import array
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import sentencepiece

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")


def build():
    command = ["cargo", "bench", "-q", "-p", "preprocess", "--bench", "sentencepiece", "--no-run",
               "--message-format=json"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.splitlines()
    found = [json.loads(line).get("executable") for line in lines]
    return [path for path in found if path and "sentencepiece" in os.path.basename(path)][-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    ours = os.environ.get("SENTENCEPIECE_BENCH") or build()
    os.sched_setaffinity(0, {args.core})
    with open(args.jsonl, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    theirs = sentencepiece.SentencePieceProcessor(model_file=args.model)
    files = tempfile.TemporaryDirectory()
    ids_file = os.path.join(files.name, "ids")
    our_seconds, their_seconds = [], []
    for round_ in range(args.rounds):
        command = [ours, args.model, args.jsonl] + ([ids_file] if round_ == 0 else [])
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        our_seconds.append(json.loads(output)["seconds"])
        start = time.perf_counter()
        if round_ == 0:
            ids = [array.array("I", theirs.encode(text)) for text in texts]
        else:
            for text in texts:
                theirs.encode(text)
        their_seconds.append(time.perf_counter() - start)
    found = array.array("I")
    with open(ids_file, "rb") as file:
        found.frombytes(file.read())
    at, differ = 0, []
    for number, expected in enumerate(ids):
        count = found[at]
        if found[at + 1 : at + 1 + count] != expected:
            differ.append(number)
        at += 1 + count
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / 1e6
    rates = [size / statistics.median(seconds) for seconds in (our_seconds, their_seconds)]
    print(f"{len(texts)} documents, {size:.1f} MB, {sum(map(len, ids))} ids: "
          f"{len(differ)} documents differ {differ[:5]}")
    print(f"ours {rates[0]:.1f} MB/s, sentencepiece {sentencepiece.__version__} {rates[1]:.1f} MB/s: "
          f"{rates[0] / rates[1]:.2f} times as fast (medians of {args.rounds})")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
