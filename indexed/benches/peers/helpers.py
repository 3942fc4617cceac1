#!/usr/bin/env python3
"""Megatron's document, sample and shuffle index of a dataset, by its compiled helpers and numpy.

    python3 helpers.py PREFIX SEQ_LENGTH

One epoch, as GPTDataset._build_document_sample_shuffle_indices does it for a dataset of one document
a sequence; in memory, nothing is saved. It needs megatron-core 0.16 and numpy. Prints one JSON
object: {"wall_s": W, "cpu_s": C, "md5": [of each array]}
"""

import hashlib
import json
import resource
import struct
import sys
import time

import numpy
from megatron.core.datasets import helpers_cpp


def main():
    prefix, seq_length = sys.argv[1], int(sys.argv[2])
    with open(prefix + ".idx", "rb") as idx:
        (documents,) = struct.unpack_from("<Q", idx.read(34), 18)
    sizes = numpy.memmap(prefix + ".idx", dtype="<i4", mode="r", offset=34, shape=(documents,))
    tokens = int(sizes.sum(dtype=numpy.int64))
    wall, cpu = time.perf_counter(), cpu_seconds()
    arrays = build(numpy.array(sizes), tokens, seq_length)
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": cpu_seconds() - cpu}
    sums = [hashlib.md5(array.tobytes()).hexdigest() for array in arrays]
    print(json.dumps({**spent, "md5": sums}))


def build(sizes, tokens, seq_length):
    rng = numpy.random.RandomState(1234)
    document = numpy.mgrid[0:1, 0 : len(sizes)][1]
    document[:] = numpy.arange(len(sizes), dtype=numpy.int32)
    document = document.reshape(-1).astype(numpy.int32)
    rng.shuffle(document)
    sample = helpers_cpp.build_sample_idx_int32(sizes, document, seq_length, 1, tokens, True, 1)
    shuffle = numpy.arange(0, len(sample) - 1, dtype=numpy.uint32)
    rng.shuffle(shuffle)
    return document, sample, shuffle


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
