#!/usr/bin/env python3
"""Seconds that gigatoken takes to encode a file of JSON lines, and nothing else.

    taskset -c 0 gigatoken_encode.py [--rounds N] VOCABULARY FILE...

VOCABULARY is a `tokenizer.json`, or `NAME.tiktoken`. One row a file: seconds and MB/s of the first
encoding in this process, and of the best of the later ones; on one thread, then on all that
`taskset` allows. Reading the vocabulary is not in them, nor is writing: what comes out is an array
in memory.
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
            # A new one each time: its memory of words is empty then.
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
