"""Compares a token dataset with Hugging Face's own GPT-2 tokenizer, document by document.

    preprocess --json-in F.jsonl --out PREFIX [--append-eod]
    preprocess --export-vocab DIR
    python hf_tokenize.py F.jsonl PREFIX_text_document DIR [--append-eod] [--key text]

Needs the PyPI packages tokenizers and numpy. Prints how many documents were compared and the first
difference; exits 1 if there is one.
"""

import argparse
import json
import struct
import sys

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DTYPES = {4: numpy.int32, 8: numpy.uint16}
BATCH = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jsonl")
    parser.add_argument("prefix", help="of the dataset, without .bin")
    parser.add_argument("vocab", help="folder with vocab.json and merges.txt")
    parser.add_argument("--append-eod", action="store_true")
    parser.add_argument("--key", default="text")
    args = parser.parse_args()

    tokenizer = gpt2(args.vocab)
    end = [tokenizer.token_to_id("<|endoftext|>")] if args.append_eod else []
    with open(args.jsonl, encoding="utf-8", newline="\n") as lines:
        texts = [json.loads(line)[args.key] for line in lines if line.strip()]
    found = list(documents(args.prefix))

    differ, first, tokens = 0, None, 0
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        for place, encoding in enumerate(tokenizer.encode_batch(batch), start):
            expected = encoding.ids + end if encoding.ids else []
            tokens += len(expected)
            ours = found[place] if place < len(found) else None
            if ours != expected:
                differ += 1
                first = first or difference(place, ours, expected)

    print(f"{len(texts)} documents in the text, {len(found)} in the dataset, {tokens} tokens")
    print(f"{differ} documents differ")
    if first:
        print(first)
    sys.exit(1 if differ or len(found) != len(texts) else 0)


def gpt2(folder):
    """GPT-2's tokenizer from its two files, special tokens being ordinary text."""
    model = models.BPE.from_file(f"{folder}/vocab.json", f"{folder}/merges.txt")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def documents(prefix):
    """The ids of each document, read by the layout of .bin and .idx without Feedline."""
    with open(f"{prefix}.idx", "rb") as file:
        index = file.read()
    assert index[:9] == b"MMIDIDX\0\0", "not an .idx"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1, f"version {version}"
    lengths = numpy.frombuffer(index, "<i4", sequences, 34)
    pointers = numpy.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    ends = numpy.frombuffer(index, "<i8", entries, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * entries, "the .idx has another length"
    dtype = numpy.dtype(DTYPES[code])
    tokens = numpy.fromfile(f"{prefix}.bin", dtype.newbyteorder("<"))
    for first, last in zip(ends[:-1], ends[1:]):
        ids = []
        for sequence in range(first, last):
            start = pointers[sequence] // dtype.itemsize
            ids.extend(tokens[start : start + lengths[sequence]].tolist())
        yield ids


def difference(place, ours, expected):
    if ours is None:
        return f"document {place} (from 0) is absent from the dataset"
    end = min(len(ours), len(expected))
    at = next((i for i, (a, b) in enumerate(zip(ours, expected)) if a != b), end)
    near = slice(max(at - 3, 0), at + 4)
    return (
        f"first: document {place} (from 0), token {at}: "
        f"expected {expected[near]}, found {ours[near]} ({len(expected)} and {len(ours)} tokens)"
    )


if __name__ == "__main__":
    main()
