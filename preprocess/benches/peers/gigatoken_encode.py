#!/usr/bin/env python3
"""Seconds that gigatoken takes to encode a file of JSON lines.

    taskset -c 0 gigatoken_encode.py [--rounds N] VOCABULARY FILE...

VOCABULARY is a `tokenizer.json`, or `NAME.tiktoken`. One row per file and thread count (one, then all
that `taskset` allows): seconds and MB/s of the first encoding and of the best later one. The times
include neither reading the vocabulary nor writing: the result is an array in memory.
"""

import argparse
import os
import time

import gigatoken


def seconds(tokenizer, file, parallel):
    start = time.perf_counter()
    ids = tokenizer.encode_files(gigatoken.JsonlFileSource([file]), parallel=parallel)
    return time.perf_counter() - start, len(ids)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("vocabulary")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print("file threads documents first_s first_MB/s best_s best_MB/s")
    for file in args.files:
        mb = os.path.getsize(file) / 1e6
        for count in sorted({1, threads}):
            # A new tokenizer each time, with an empty cache of words.
            if args.vocabulary.endswith(".tiktoken"):
                tokenizer = gigatoken.Tokenizer.from_tiktoken(args.vocabulary)
            else:
                tokenizer = gigatoken.Tokenizer(args.vocabulary)
            first, documents = seconds(tokenizer, file, count > 1)
            later = [seconds(tokenizer, file, count > 1)[0] for _ in range(args.rounds - 1)]
            best = min(later, default=first)
            rates = f"{first:.3f} {mb / first:.1f} {best:.3f} {mb / best:.1f}"
            print(os.path.basename(file), count, documents, rates, flush=True)


main()
