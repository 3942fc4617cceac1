#!/usr/bin/env python3
"""CPM-2's tokenizer in Python, with the costs and the bugs of the published one.

    pip install jieba==0.42.1
    python encdec_python.py VOCAB.txt CORPUS.jsonl [KIND]      MB/s over the "text" of each line
    python encdec_python.py VOCAB.txt CORPUS.jsonl KIND OUT    also writes the ids, a JSON list per line
    python encdec_python.py --golden FOLDER                    writes the committed vocabulary and cases

KIND is cpm2 (the default), yuan or cpm-t5. The search for the longest token builds a string for every
candidate, as the published one does.
"""

import json
import random
import sys
import time
from pathlib import Path

import jieba

SPACE, NEWLINE = "\u2582", "\u2583"
KEPT_WIDE = set("，。！（）？、；：")


def narrow(text):
    chars = []
    for char in text:
        code = ord(char)
        if char not in KEPT_WIDE:
            code = 0x20 if code == 0x3000 else code - 0xFEE0
            code = code if 0x20 <= code <= 0x7E else ord(char)
        chars.append(chr(code))
    return "".join(chars)


def has_han(token):
    return any("\u4e00" <= char <= "\u9fff" for char in token)


class EncDec:
    def __init__(self, vocab_file, kind="cpm2"):
        with open(vocab_file, encoding="utf-8") as lines:
            self.ids = {line.strip(): number for number, line in enumerate(lines)}
        self.tokens = {number: token for token, number in self.ids.items()}
        self.kind = kind
        self.marks = kind != "cpm-t5"

    def split(self, word):
        if len(word) > 200:
            return ["<unk>"]
        tokens, start = [], 0
        while start < len(word):
            found = None
            for end in range(len(word), start, -1):
                piece = "".join(word[start:end])
                if start > 0 and self.marks and not has_han(piece):
                    piece = "##" + piece
                if piece in self.ids:
                    found = piece
                    break
            tokens.append(found if found is not None else "<unk>")
            start = end if found is not None else start + 1
        return tokens

    def encode(self, text):
        if self.kind == "cpm2":
            text = narrow(text)
        tokens = []
        for word in jieba.cut(text):
            tokens += self.split(word.translate(str.maketrans(" \n", SPACE + NEWLINE)))
        ids = [self.ids[token] for token in tokens]
        if self.kind == "cpm-t5" or not ids:
            return ids
        inner = []
        for at in range(1, len(ids) - 1):
            latin = not has_han(tokens[at - 1]) and not has_han(tokens[at + 1])
            if not (ids[at] == 10 and latin):
                inner.append(ids[at])
        return [ids[0]] + inner + [ids[-1]]


def texts(lines):
    return [json.loads(line)["text"] for line in lines]


def measure(vocab, corpus, kind="cpm2", out=None):
    tokenizer = EncDec(vocab, kind)
    with open(corpus, encoding="utf-8") as lines:
        documents = texts(lines)
    jieba.initialize()
    start = time.process_time()
    encoded = [tokenizer.encode(text) for text in documents]
    seconds = time.process_time() - start
    size = sum(len(text.encode()) for text in documents)
    print(f"{len(documents)} documents, {size / 1e6:.1f} MB, {size / 1e6 / seconds:.3f} MB/s")
    if out:
        Path(out).write_text("".join(json.dumps(ids, separators=(",", ":")) + "\n" for ids in encoded))


WRITTEN = [
    "天下熙熙，皆为利来；天下攘攘，皆为利往。",
    "他来到了网易杭研大厦，小明硕士毕业于中国科学院计算所，后在日本京都大学深造。",
    "Hello world 123, this is CPM-2. The old-time Ph.D said 3.14% of v2.0 -- ok?",
    "ＡＢＣ１２３，全角　空格（括号）：［方］～！",
    "今天下雨。\n明天\t晴天。\r\n后天 x y  z\n\n",
    "C++和c#语言，AT&T公司的T恤，B超，卡拉OK，3.5%的人",
    "李小福是创新办主任也是云计算方面的专家；什么是八一双鹿",
    "𠀀𠮷野家，🙂 emoji，한국어 かな Ωμέγα",
    "a", "中", " ", "\n", "", "-", "，", "a b", "a , b", "1,2,3", "中 文 a b c 中",
    "-" * 250 + "中文" + "a" * 201 + "b" * 200,
    "<s_0><eod> special", "永和服装饰品有限公司", "结婚的和尚未结婚的", "工信处女干事每月经过下属科室",
]


def random_texts(count, seed):
    source = random.Random(seed)
    words = [w for w in jieba.dt.FREQ if jieba.dt.FREQ[w] and len(w) > 1]
    words = source.sample(sorted(words), 400)
    made = []
    for _ in range(count):
        parts = []
        for _ in range(source.randint(1, 25)):
            kind = source.random()
            if kind < 0.5:
                parts.append(source.choice(words))
            elif kind < 0.65:
                parts.append("".join(chr(source.randrange(0x4E00, 0x9FFF)) for _ in range(source.randint(1, 5))))
            elif kind < 0.8:
                parts.append("".join(source.choice("abcXYZ019+#&._%- ,") for _ in range(source.randint(1, 8))))
            elif kind < 0.9:
                parts.append(source.choice(["，", "。", "\n", "\r\n", " ", "\u3000", "、", "！", "Ａ", "１．５", "\x1c"]))
            else:
                parts.append(chr(source.choice([source.randrange(0x20, 0x3000), source.randrange(0x1F300, 0x1FB00)])))
        made.append("".join(parts))
    return made


def golden(folder):
    folder = Path(folder)
    jieba.initialize()
    cases = WRITTEN + random_texts(200, 20)
    cuts = [{"text": text, "words": list(jieba.cut(text))} for text in cases]
    (folder / "jieba").mkdir(exist_ok=True)
    dump(folder / "jieba/cuts.json", cuts)

    # A small vocabulary in the order of the published one: its first lines, characters, then words.
    special = ["<unk>", "<s>", "</s>", NEWLINE, "<sep>", "<pad>", "<mask>", "<eod>", "\u2581", ",", SPACE]
    words = {word for cut in cuts for word in cut["words"] if 1 < len(word) <= 6}
    chars = {char for text in cases for char in text if not char.isspace()}
    source = random.Random(21)
    pieces = source.sample(sorted(chars), len(chars) * 2 // 3) + source.sample(sorted(words), len(words) // 2)
    pieces += ["##" + piece for piece in source.sample(sorted(chars | words), 300) if not has_han(piece)]
    tokens = dict.fromkeys(special + sorted({*pieces, *"ab中"}))
    tokens = [t for t in tokens if t == t.strip()] + [f"<s_{number}>" for number in range(190)]
    (folder / "encdec").mkdir(exist_ok=True)
    plain = folder / "encdec/vocab.txt"
    plain.write_text("".join(token + "\n" for token in tokens), encoding="utf-8")
    # As bpe_cn_en: one more token before, so that id 10 is the comma.
    comma = folder / "encdec/vocab_comma.txt"
    tokens.insert(7, "<go>")
    comma.write_text("".join(token + "\n" for token in tokens), encoding="utf-8")
    for vocab in [plain, comma]:
        for kind in ["cpm2", "yuan", "cpm-t5"]:
            tokenizer = EncDec(vocab, kind)
            encoded = [{"text": text, "ids": tokenizer.encode(text)} for text in cases]
            dump(folder / f"encdec/{vocab.stem}.{kind}.json", encoded)

    # A user dictionary, and a dictionary that replaces jieba's.
    user = "云计算 5\n李小福 2 nr\n创新办 3 i\neasy_install 3 eng\n好用 300\n韩玉赏鉴 3 nz\n八一双鹿 3 nz\n台中\n凱特琳 nz\nEdu Trust认证 2000\n網易杭研\n杭研大厦\n熙攘 0\n"
    (folder / "jieba/user.txt").write_text(user, encoding="utf-8")
    own = jieba.Tokenizer()
    own.load_userdict(str(folder / "jieba/user.txt"))
    more = cases + ["「台中」正確應該不會被切開。mac上可分出「石墨烯」；此時又可以分出來凱特琳了。", "人流熙攘，車馬熙攘。", "網易杭研大厦easy_install好用,Edu Trust认证"]
    dump(folder / "jieba/cuts_user.json", [{"text": t, "words": list(own.cut(t))} for t in more])
    chosen = random.Random(22).sample(sorted(w for w in jieba.dt.FREQ if jieba.dt.FREQ[w]), 1500)
    chosen += [w for cut in cuts[:12] for w in cut["words"] if w.strip() == w and len(w) > 1]
    dictionary = "".join(f"{word} {jieba.dt.FREQ.get(word) or 7} n\n" for word in chosen)
    (folder / "jieba/small.txt").write_text(dictionary, encoding="utf-8")
    # Words that must be split are global to the process, not per dictionary.
    jieba.finalseg.Force_Split_Words.clear()
    small = jieba.Tokenizer(str(folder / "jieba/small.txt"))
    dump(folder / "jieba/cuts_small.json", [{"text": t, "words": list(small.cut(t))} for t in more])


def dump(file, cases):
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--golden":
        golden(sys.argv[2])
    else:
        measure(*sys.argv[1:])
