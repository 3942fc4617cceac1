#!/usr/bin/env python3
"""Samples a second of Megatron's GPTDataset in a torch DataLoader, and the hash of its stream.

    python3 megatron_loader.py PREFIX --seq-length 2048 --samples 20000 [--cold] [--workers 2]

It needs torch and megatron-core 0.16. The indexes are built before the clock starts, in --cache. With
--cold the pages of the `.bin` are dropped first, and no process maps it yet. Prints one JSON object:

    {"samples": N, "seconds": S, "samples_per_second": R,
     "sha256": of the tokens of all samples as little-endian int64, in order}

The hash covers `tokens` followed by the last label of each row: the seq-length + 1 tokens of a sample.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time

import numpy
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split


class Tokenizer:
    """What the dataset needs of a tokenizer: an end-of-document id, and a name for its caches."""

    def __init__(self, eod):
        self.eod = eod
        self.pad = eod
        self.vocab_size = eod + 1
        self.unique_identifiers = {"class": "Tokenizer"}


class Order(torch.utils.data.Sampler):
    """The samples in the order of Megatron's sampler for one data-parallel rank: consecutive."""

    def __init__(self, first, end, batch):
        self.first, self.end, self.batch = first, end, batch

    def __iter__(self):
        for first in range(self.first, self.end, self.batch):
            yield list(range(first, min(first + self.batch, self.end)))


def main():
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        dataset = open_dataset(args, args.cache or scratch)
        drop_pages(args.prefix + ".bin", args.cold)
        # The arrays above were mapped by this process; the workers start with none of the data.
        print(json.dumps(run(dataset, args)))


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--samples", type=int, required=True, help="to read")
    parser.add_argument("--first", type=int, default=0, help="the first to read")
    parser.add_argument("--built-for", type=int, help="samples of the index; default: first + samples")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--split", default="1,0,0")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", help="a folder for the indexes")
    parser.add_argument("--eod", type=int, default=50256)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--no-mmap", action="store_true", help="its file reader instead of its map")
    return parser.parse_args()


def open_dataset(args, cache):
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        path_to_cache=cache,
        mmap_bin_files=not args.no_mmap,
        tokenizer=Tokenizer(args.eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(args.prefix, multimodal=False, mmap=not args.no_mmap)
    documents = numpy.arange(len(indexed), dtype=numpy.int32)  # sequences, as Megatron splits
    count = args.built_for or args.first + args.samples
    return GPTDataset(indexed, args.prefix, documents, count, Split.train, config)


def drop_pages(path, wanted):
    if not wanted:
        return
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def run(dataset, args):
    digest = hashlib.sha256()
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=Order(args.first, args.first + args.samples, args.batch),
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    # The hash is taken afterwards, so that the time of both loaders is that of reading.
    kept = []
    begin = time.perf_counter()
    for batch in loader:
        kept.append((batch["tokens"].numpy(), batch["labels"].numpy()[:, -1:]))
    seconds = time.perf_counter() - begin
    for tokens, last in kept:
        digest.update(numpy.concatenate([tokens, last], axis=1).astype("<i8").tobytes())
    return {
        "samples": args.samples,
        "seconds": round(seconds, 4),
        "samples_per_second": round(args.samples / seconds, 1),
        "sha256": digest.hexdigest(),
    }


if __name__ == "__main__":
    main()
