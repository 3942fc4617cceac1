#!/usr/bin/env python3
"""Makes demo/tokenizer.json: byte-level BPE of 4,096 tokens, trained on the demo corpus.

    zstd -dc demo/data/corpus.jsonl.zst | demo/data/make_tokenizer.py demo/tokenizer.json

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
        vocab_size=4096,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (json.loads(line)["text"] for line in sys.stdin)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(sys.argv[1], pretty=False)


if __name__ == "__main__":
    main()
