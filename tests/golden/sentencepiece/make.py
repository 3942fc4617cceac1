#!/usr/bin/env python3
"""Trains the models of this folder and writes down what SentencePiece's C++ library does with them.

    make.py FOLDER

Needs the package `sentencepiece`. Training is deterministic; another version of the library may
train other models, whose ids and texts are then as good.
"""

import io
import json
import os
import random
import sys

import sentencepiece

WORDS = (
    "the of and to in is a token text model piece score path best word space line file byte read "
    "write index sample batch shard step rank train merge split unknown character language data "
    "storage buffer queue reader writer order offset length header magic version number 数据 模型 "
    "语言 文本 训练 分词 存储 索引 样本 字节 长度 文件 顺序 读取 写入 的 是 在 了 和 中文 ﬁle Ａ１ naïve café"
).split()

# What is replaced, and with what, in code points: a ligature, full-width letters, a combining
# accent, one that vanishes, white space, one that begins with a space.
RULES = [
    ("FB01", "66 69"), ("FF21", "41"), ("FF11", "31"), ("FF0C", "2C"), ("65 301", "E9"),
    ("41 30A", "C5"), ("41", "61"), ("41 42 43", "78"), ("200D", ""), ("1", ""), ("9", "20"),
    ("A", "20"), ("A0", "20"), ("3000", "20"), ("A8", "20 308"), ("2026", "2E 2E 2E"),
    ("3382", "3BC 41 20"),
]

TEXTS = [
    "", " ", "  ", "\u2581", " \u2581 ", "a", " a ", "  a  b  ", "the text of a model", "The Text",
    "数据的顺序是模型训练的", "中文text混合数据 file", "\0", "a\0b", "\x01", "x\u200dy", "\t\n\u3000",
    "e\u0301e\u0301 cafe\u0301", "ABC AB A\u030a A", "\ufb01le \uff21\uff11\uff0c", "\u00a8\u00a8 \u00a8",
    "\u2026 \u3382\u3382 b", "\U0001f600\U0001f600 \u9fa5", "a\U0001f600\u9fa5b \u9fa5", "<s> </s> <unk>",
    "<sep>a<sep> b<sep>", "abab abc ab c", "a b a b", "zzzzzzzzzz", "-" * 70, "token " * 12,
    "tokentokentoken" * 6, "<0x41> A", "\ufffd", "\u2581of\u2581of of", "naïve café", "1234567890",
    "x\u2581\u2581y  z", "\U0010ffff", "write read\r\nindex\u00a0shard", "z <ctl> z",
    "ab" + "-" * 19, "x abc," + "-" * 22, "<sep>\u3002" + "zz" * 21, "of ab abc" + "token" * 7,
]


def sentences():
    pick = random.Random(3)
    for _ in range(1500):
        yield " ".join(pick.choice(WORDS) for _ in range(pick.randint(3, 12)))


def train(folder, name, **options):
    path = os.path.join(folder, f"{name}.model")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(), model_writer=out, minloglevel=2, num_threads=1,
        hard_vocab_limit=False,
        **{"vocab_size": 300, "character_coverage": 1.0, **options})
    model = out.getvalue()
    with open(path, "wb") as file:
        file.write(model)
    return model


def save(folder, name, model):
    with open(os.path.join(folder, f"{name}.model"), "wb") as file:
        file.write(model)


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))


def main():
    folder = sys.argv[1]
    rules = os.path.join(folder, "rules.tsv")
    with open(rules, "w", encoding="utf-8") as file:
        file.writelines(f"{source}\t{target}\n" for source, target in RULES)
    own = {"normalization_rule_tsv": rules}
    plain = {"normalization_rule_name": "identity"}
    named = {"user_defined_symbols": ["<sep>", "ab", "abc", "a b", "\u2581of", "中文"]}
    fallback = {"byte_fallback": True, "vocab_size": 520}
    keep = {"remove_extra_whitespaces": False, **plain}
    for kind in ["unigram", "bpe", "char", "word"]:
        size = {"vocab_size": 70} if kind == "word" else {}
        train(folder, kind, model_type=kind, **own, **size)
    for kind in ["unigram", "bpe"]:
        train(folder, f"{kind}_named", model_type=kind, **named, **own)
        train(folder, f"{kind}_bytes", model_type=kind, **fallback, **keep)
        train(folder, f"{kind}_suffix", model_type=kind, treat_whitespace_as_suffix=True, **plain)
        train(folder, f"{kind}_across", model_type=kind, split_by_whitespace=False, **keep,
              add_dummy_prefix=False, control_symbols=["<ctl>"])
    train(folder, "char_named", model_type="char", **named, **plain)
    train(folder, "bpe_spaces", model_type="bpe", allow_whitespace_only_pieces=True,
          **fallback, **keep)
    # The last value of a field counts: a specification that says no more than "do not escape".
    for kind in ["unigram", "bpe"]:
        with open(os.path.join(folder, f"{kind}_bytes.model"), "rb") as file:
            save(folder, f"{kind}_unescaped", file.read() + b"\x1a\x02\x28\x00")
    # A merge that may be made but not kept.
    with open(os.path.join(folder, "bpe.model"), "rb") as file:
        save(folder, "bpe_unused", with_unused(file.read(), ["tok", "token", "▁the", "in"]))
    os.remove(rules)
    write_cases(folder)


def with_unused(model, pieces):
    """The pieces, whose messages hold text and score, get type 5."""
    for piece in pieces:
        text = piece.encode()
        inner = b"\x0a" + varint(len(text)) + text + b"\x15"
        at = model.find(inner)
        if at < 1:
            continue
        assert model[at - 1] == len(inner) + 4 and model[at - 2] == 0x0A
        end = at + len(inner) + 4
        model = model[: at - 1] + varint(len(inner) + 6) + model[at:end] + b"\x18\x05" + model[end:]
    return model


def write_cases(folder):
    cases = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".model"):
            library = sentencepiece.SentencePieceProcessor(model_file=os.path.join(folder, file))
            ids = [library.encode(text) for text in TEXTS]
            cases[file] = {
                "size": library.get_piece_size(),
                "eos": library.eos_id(),
                "ids": ids,
                "decoded": [library.decode(one) for one in ids],
                "each_decoded": [library.decode([one]) for one in range(library.get_piece_size())],
            }
    with open(os.path.join(folder, "cases.json"), "w", encoding="ascii") as out:
        out.write('{"version": %s,\n"texts": %s,\n"models": {\n' % (
            json.dumps(sentencepiece.__version__), json.dumps(TEXTS)))
        out.write(",\n".join(f"{json.dumps(name)}: {json.dumps(case)}"
                             for name, case in cases.items()))
        out.write("\n}}\n")


if __name__ == "__main__":
    main()
