"""The block shuffle of indexed/FORMAT.md, implemented again from its definition.

    block_shuffle.py SAMPLES BLOCK_SAMPLES WINDOW_BLOCKS SEED EPOCH FIRST COUNT

prints the samples at COUNT positions from FIRST on. It is written to be readable, not fast.
"""

import sys

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def derive(key, number):
    return mix((key + number + STEP) & MASK)


def permute(key, length, number):
    bits = max(length - 1, 0).bit_length()
    low_bits = bits // 2
    high_bits = bits - low_bits
    while True:
        high, low = number >> low_bits, number & ((1 << low_bits) - 1)
        for turn in range(24 if bits <= 9 else 6):
            round_key = (key + (turn + 1) * STEP) & MASK
            if turn % 2 == 0:
                high ^= (mix(round_key ^ low) >> 32) & ((1 << high_bits) - 1)
            else:
                low ^= (mix(round_key ^ high) >> 32) & ((1 << low_bits) - 1)
        number = (high << low_bits) | low
        if number < length:
            return number


def order(samples, block, window, seed, epoch):
    """Yields all samples in order: by the definition, window after window."""
    key = derive(mix(seed), epoch)
    blocks = -(-samples // block)
    ranked = (permute(derive(key, 0), blocks, rank) for rank in range(blocks))
    number = 0
    while True:
        taken = [nth for _, nth in zip(range(window), ranked)]
        if not taken:
            return
        inside = [nth * block + i for nth in taken for i in range(min(block, samples - nth * block))]
        for position in range(len(inside)):
            yield inside[permute(derive(key, 1 + number), len(inside), position)]
        number += 1


def main():
    samples, block, window, seed, epoch, first, count = map(int, sys.argv[1:])
    for position, sample in enumerate(order(samples, block, window, seed, epoch)):
        if position >= first + count:
            break
        if position >= first:
            print(sample)


main()
