#!/usr/bin/env python3
"""BERT's tokenizer of Hugging Face's `tokenizers`, without special tokens.

    pip install tokenizers
    python wordpiece_hf.py VOCAB.txt CORPUS.jsonl CASE [OUT]    MB/s over the "text" of each line, one
                                                                thread; the ids, a JSON list per line
    python wordpiece_hf.py --train VOCAB.txt CORPUS.jsonl CASE  trains a vocabulary of 30,000 tokens
    python wordpiece_hf.py --golden FOLDER                      writes the committed vocabularies and cases

CASE is lower or kept.
"""

import json
import random
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer(model, case):
    made = Tokenizer(model)
    made.normalizer = normalizers.BertNormalizer(lowercase=case == "lower")
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def train(vocab, documents, case, size):
    made = tokenizer(models.WordPiece(unk_token="[UNK]"), case)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(documents, trainer)
    ids = made.get_vocab()
    # The file has one token per line, so it cannot have tokens with line ends or outer white space.
    tokens = [t for t in sorted(ids, key=ids.get) if t == t.strip() and len(t.splitlines()) == 1]
    Path(vocab).write_text("".join(token + "\n" for token in tokens), encoding="utf-8")


def read(vocab, case):
    lines = Path(vocab).read_text(encoding="utf-8").split("\n")[:-1]
    ids = {token: number for number, token in enumerate(lines)}
    return tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100), case)


def texts(corpus):
    with open(corpus, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def measure(vocab, corpus, case, out=None):
    made, documents = read(vocab, case), texts(corpus)
    start = time.process_time()
    encoded = [made.encode(text, add_special_tokens=False).ids for text in documents]
    seconds = time.process_time() - start
    size = sum(len(text.encode()) for text in documents)
    print(f"{len(documents)} documents, {size / 1e6:.1f} MB, {size / 1e6 / seconds:.3f} MB/s")
    if out:
        Path(out).write_text("".join(json.dumps(ids, separators=(",", ":")) + "\n" for ids in encoded))


WRITTEN = [
    "The quick brown fox jumps over the lazy dog. It's 3.14, isn't it?",
    "Tokenization of words: tokenize, tokenizer, tokenizing, untokenized!",
    "Café Zürich, naïve façade; Ångström, Łódź, İstanbul, ΣΊΣΥΦΟΣ, Straße, ǅ",
    "中文和English混排，今天是2021年。「引号」《书名》",
    "한국어 조선말, にほんご カタカナ が ぱ, हिन्दी, ไทย, العربية",
    "a\u0301e\u0300 .\u0301 \u0301x 中\u0301文 x\u0323\u0307 x\u0307\u0323",
    "zero\u200bwidth soft\u00adhyphen bell\x07 tab\there nul\x00 nel\x85x vt\x0bx ff\x0cx bom\ufeff",
    "line\nbreak\r\nand\u2028separators\u2029and\u00a0spaces\u3000wide\u2003em\u1680ogham",
    "豈更車 \U0002f800\U0002f801 \u212b\u2126 \u037e \u1fef ﬁ ① ½ ㎏",
    "🙂👍🏽 e\u0301\U0001f9d1 \u166d \U000111c9 \u1734 \u0898 \u2e43 \U00011938 \u1c89 \ua7cb a\u1885 a\u1886 a\ua9bd a\U0001171e",
    "x" * 100 + " " + "x" * 101 + " " + "é" * 100 + " " + "é" * 101 + " " + "中" * 120,
    "[MASK] [UNK] ##a # ## $ + < = > ^ ` | ~ € £ § ° ± «quoted»",
    "", " ", "\n\n", "a", "中", ".", "\u200b", "a\u200bb c\ufffdd e\ue000f",
]


def random_texts(count, seed):
    source = random.Random(seed)
    pools = [(0x20, 0x7F), (0x61, 0x7B), (0x41, 0x5B), (0, 0x20), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE80),
             (0x1E00, 0x2100), (0x3000, 0x3100), (0x4E00, 0x5000), (0xAC00, 0xAC80), (0xF900, 0xFB00), (0xFF00, 0xFFF0), (0x10000, 0x20000), (0, 0x110000)]
    made = []
    for _ in range(count):
        text = ""
        for _ in range(source.randint(1, 20)):
            first, last = source.choice(pools)
            text += "".join(chr(c) for c in (source.randrange(first, last) for _ in range(source.randint(1, 6))) if not 0xD800 <= c < 0xE000)
            text += source.choice(["", "", " ", "a", ","])
        made.append(text)
    return made


def golden(folder):
    folder = Path(folder) / "wordpiece"
    folder.mkdir(exist_ok=True)
    cases = WRITTEN + random_texts(400, 30)
    for case in ["lower", "kept"]:
        vocab = folder / f"{case}.txt"
        train(vocab, cases[:60], case, 1200)
        made = read(vocab, case)
        lines = ",\n".join(json.dumps({"text": text, "ids": made.encode(text, add_special_tokens=False).ids}) for text in cases)
        (folder / f"{case}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--golden":
        golden(sys.argv[2])
    elif sys.argv[1] == "--train":
        train(sys.argv[2], texts(sys.argv[3]), sys.argv[4], 30000)
    else:
        measure(*sys.argv[1:])
