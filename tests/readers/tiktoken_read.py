#!/usr/bin/env python3
"""Compares the tokens of a dataset with those of tiktoken for the same JSON lines.

    tiktoken_read.py gpt2|r50k|cl100k|o200k RANKS.tiktoken LINES.jsonl PREFIX_text_document

Prints how many documents there are and how many differ; exits with 1 if one does.
"""

import json
import sys

import numpy
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public

DTYPES = {4: numpy.int32, 8: numpy.uint16}


def pattern(name):
    if name in ("gpt2", "r50k"):
        return openai_public.r50k_pat_str
    # Replaces the function that would download the ranks.
    openai_public.load_tiktoken_bpe = lambda *args, **kwargs: {}
    return getattr(openai_public, f"{name}_base")()["pat_str"]


def main():
    name, ranks_file, lines_file, prefix = sys.argv[1:]
    ranks = load_tiktoken_bpe(ranks_file)
    encoding = tiktoken.Encoding(
        name, pat_str=pattern(name), mergeable_ranks=ranks, special_tokens={}
    )
    head = open(prefix + ".idx", "rb").read(34)
    dtype = DTYPES[head[17]]
    count = int.from_bytes(head[18:26], "little")
    lens = numpy.fromfile(prefix + ".idx", numpy.int32, count, offset=34)
    tokens = numpy.memmap(prefix + ".bin", dtype, "r")
    documents = differing = start = 0
    with open(lines_file, encoding="utf-8") as lines:
        for line, length in zip(lines, lens, strict=True):
            expected = encoding.encode_ordinary(json.loads(line)["text"])
            differing += tokens[start : start + length].tolist() != expected
            start += int(length)
            documents += 1
    print(f"{documents} documents, {differing} differ")
    sys.exit(differing > 0)


main()
