#!/usr/bin/env python3
"""Makes demo/tokenizer.json: byte-level BPE of 2,048 tokens, trained on the English part of the demo corpus.

    feedline clean --json-in demo/data/corpus.jsonl.zst --out english.jsonl --min-script latin=0.8
    demo/data/make_tokenizer.py demo/tokenizer.json < english.jsonl

Needs tokenizers 0.22.1 of the Python package index.
"""
import json
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.loads(line)["text"] for line in sys.stdin)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(sys.argv[1], pretty=False)


if __name__ == "__main__":
    main()
