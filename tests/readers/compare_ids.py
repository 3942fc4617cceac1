"""Compares the ids that `cargo run --release -p preprocess --example ids` wrote with those of
the library the vocabulary belongs to, document by document.

    compare_ids.py hf tokenizer.json corpus.jsonl ids.bin
    compare_ids.py tiktoken NAME corpus.jsonl ids.bin FILE.tiktoken
    compare_ids.py megatron v1|v2 corpus.jsonl ids.bin vocab.json

Exits with 1 if a document differs. Needs `pip install tokenizers` or `tiktoken`, and numpy.
"""

import json
import pathlib
import sys

import numpy


def encoder(kind, model, more):
    if kind == "hf":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(model)
        tokenizer.no_truncation()
        return lambda texts: [one.ids for one in tokenizer.encode_batch_fast(texts)]
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext import openai_public

    if kind == "megatron":
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "golden/tokenizers"))
        from make import megatron_tiktoken

        tiktoken_tokenizer = megatron_tiktoken()
        size = len(json.load(open(more[0]))) + 1000
        tokenizer = tiktoken_tokenizer.TikTokenTokenizer(more[0], pattern=model, vocab_size=size)
        return lambda texts: [tokenizer.text_to_ids(text) for text in texts]
    published = {"r50k_base": openai_public.r50k_pat_str, "p50k_base": openai_public.r50k_pat_str}
    if model in published:
        pattern = published[model]
    else:
        import inspect

        openai_public.load_tiktoken_bpe = lambda *_, **__: {}
        pattern = getattr(openai_public, model)()["pat_str"]
    tokenizer = tiktoken.Encoding(
        model, pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(more[0]), special_tokens={}
    )
    return tokenizer.encode_ordinary_batch


def batches(file, size):
    batch = []
    for line in open(file, encoding="utf-8"):
        batch.append(json.loads(line)["text"])
        if len(batch) == size:
            yield batch
            batch = []
    yield batch


def main(kind, model, corpus, ids, *more):
    encode = encoder(kind, model, more)
    ours = numpy.memmap(ids, dtype="<u4", mode="r")
    at = documents = differing = tokens = 0
    for texts in batches(corpus, 256):
        for text, expected in zip(texts, encode(texts)):
            count = int(ours[at])
            found = ours[at + 1 : at + 1 + count]
            at += 1 + count
            documents += 1
            tokens += len(expected)
            if len(expected) != count or not numpy.array_equal(found, expected):
                differing += 1
                if differing <= 5:
                    place = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), -1)
                    parts = found[place:][:8].tolist(), expected[place:][:8]
                    print(documents, place, *parts, text[:60])
    assert at == len(ours), "more documents than the corpus has"
    print(f"{documents} documents, {tokens} tokens, {differing} documents differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
