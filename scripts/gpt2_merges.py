#!/usr/bin/env python3
"""GPT-2's merges as pairs of ids, two bytes each, little-endian, in rank order.

    cd preprocess/assets/gpt2
    zstd -dc merges.txt.zst | ../../../scripts/gpt2_merges.py | zstd --ultra -22 >merges.bin.zst

With this file, a program starts without spelling and looking up a hundred thousand tokens.
"""

import struct
import sys


def byte_chars():
    """The characters that represent bytes, in the order of GPT-2's ids."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = len(set(range(256)) - set(printed))
    return [chr(code) for code in [*printed, *range(0x100, 0x100 + others)]]


def main():
    ids = {char: i for i, char in enumerate(byte_chars())}
    lines = sys.stdin.buffer.read().decode("utf-8").splitlines()
    for line in lines[1:]:
        left, right = line.split(" ")
        sys.stdout.buffer.write(struct.pack("<HH", ids[left], ids[right]))
        assert ids.setdefault(left + right, len(ids)) == len(ids) - 1, f"{line}: duplicate token"


main()
