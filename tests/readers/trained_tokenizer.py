"""Encodes texts with both files of a trained tokenizer, each with the package for its format.

    feedline tokenizer train --type bpe --vocab-size N --out DIR F.jsonl
    python trained_tokenizer.py F.jsonl DIR

Needs the PyPI packages tokenizers and sentencepiece. Prints JSON: documents, tokens, and documents
whose ids differ.
"""

import json
import sys

import sentencepiece
from tokenizers import Tokenizer


def main():
    jsonl, folder = sys.argv[1:]
    hugging_face = Tokenizer.from_file(f"{folder}/tokenizer.json")
    model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")
    assert hugging_face.get_vocab_size() == model.get_piece_size()
    assert [model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()] == [0, 1, 2, -1]
    with open(jsonl, encoding="utf-8", newline="\n") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    tokens, differ = 0, 0
    for text, encoding in zip(texts, hugging_face.encode_batch(texts, add_special_tokens=False)):
        ids = model.encode(text)
        assert model.decode(ids) == text, text
        assert hugging_face.decode(encoding.ids) == text, text
        tokens += len(ids)
        differ += ids != encoding.ids
    print(json.dumps({"documents": len(texts), "tokens": tokens, "differ": differ}))


if __name__ == "__main__":
    main()
