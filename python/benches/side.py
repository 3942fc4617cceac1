#!/usr/bin/env python3
"""One measurement of the Python package or of a peer, as one JSON object.

    side.py loader PREFIX --samples N [--cold]     batches of feedline.Loader
    side.py getitems PREFIX --samples N            batches of feedline.Dataset.__getitems__
    side.py torch PREFIX --samples N               dicts of tensors of feedline.torch.Loader
    side.py resume PREFIX --first N                from opening the data to the first batch
    side.py encode|gigatoken|huggingface FILE --vocab FOLDER
                                                   ids of all texts of a JSON-lines file, in memory
    side.py import                                 the import of the package

The loops keep what Megatron's side keeps: the tokens of each batch and the last label.
"""

import argparse
import json
import os
import subprocess
import sys
import time


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side")
    parser.add_argument("input", nargs="?")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--order", default="megatron")
    parser.add_argument("--cache", help="a folder for the indexes")
    parser.add_argument("--vocab", help="a folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    sides = {side.__name__: side for side in (loader, getitems, torch, resume, encode, gigatoken)}
    sides |= {"huggingface": huggingface, "import": importing}
    print(json.dumps(sides[args.side](args)))


def opened(args):
    import feedline
    import numpy  # noqa: F401, imported by the first batch, which is not a cost of each

    dataset = feedline.open(
        args.input,
        sequence_length=args.seq_length,
        num_samples=args.first + args.samples,
        order=args.order,
        path_to_cache=args.cache,
    )
    if args.cold:
        handle = os.open(args.input + ".bin", os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return dataset


def rate(count, begin):
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "per_second": count / seconds}


def loader(args):
    import feedline

    batches = feedline.Loader(opened(args), micro_batch_size=args.batch)
    begin = time.perf_counter()
    count = 0
    for batch in batches:
        count += len(batch["tokens"])
    return rate(count, begin)


def getitems(args):
    dataset = opened(args)
    begin = time.perf_counter()
    for first in range(0, args.samples, args.batch):
        dataset.__getitems__(range(first, min(first + args.batch, args.samples)))
    return {**rate(args.samples, begin), "hits": dataset._core.hits}


def torch(args):
    from feedline.torch import Loader

    batches = Loader(opened(args), micro_batch_size=args.batch)
    begin = time.perf_counter()
    count = 0
    for batch in batches:
        count += len(batch["tokens"])
    return rate(count, begin)


def resume(args):
    import feedline

    begin = time.perf_counter()
    batches = feedline.Loader(
        opened(args), micro_batch_size=args.batch, samples_consumed=args.first
    )
    next(batches)
    return rate(1, begin)


def texts_of(path):
    with open(path) as lines:
        return [json.loads(line)["text"] for line in lines]


def encode(args):
    import feedline

    texts = texts_of(args.input)
    tokenizer = feedline.Tokenizer(f"gpt2:{args.vocab}/vocab.json,{args.vocab}/merges.txt")
    begin = time.perf_counter()
    batch = tokenizer.encode_batch(texts)
    return {**rate(sum(map(len, texts)), begin), "tokens": len(batch.values)}


def gpt2(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(f"{folder}/vocab.json", f"{folder}/merges.txt"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def gigatoken(args):
    from gigatoken import Tokenizer

    texts = texts_of(args.input)
    tokenizer = Tokenizer.from_json(gpt2(args.vocab).to_str())
    begin = time.perf_counter()
    batch = tokenizer.encode_batch(texts)
    took = rate(sum(map(len, texts)), begin)
    import awkward

    return {**took, "tokens": int(awkward.sum(awkward.num(batch)))}


def huggingface(args):
    texts = texts_of(args.input)
    tokenizer = gpt2(args.vocab)
    begin = time.perf_counter()
    batch = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return {**rate(sum(map(len, texts)), begin), "tokens": sum(len(each) for each in batch)}


def importing(_):
    text = "import time; t = time.perf_counter(); import feedline; print(time.perf_counter() - t)"
    out = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)
    return {"seconds": float(out.stdout)}


if __name__ == "__main__":
    main()
