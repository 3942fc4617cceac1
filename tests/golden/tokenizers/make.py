"""Trains a small tokenizer of each family on the demo's text, and writes what the library
`tokenizers` (0.23.3) makes of some texts, and others of a vocabulary of tiktoken's kind.

    python make.py ../../../demo/data/corpus.jsonl.zst
"""

import base64
import json
import sys

import zstandard
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers import processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
O200K = (
    WORD % ("*", "+") + SHORT + WORD % ("+", "*") + SHORT
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
CHINESE = ["床前明月光，疑是地上霜。举头望明月，低头思故乡。", "白日依山尽，黄河入海流。欲穷千里目，更上一层楼。"]

TEXTS = [
    "", " ", "  ", "a", " a", "  a", "   a  b ", "Hello, world!", "\n", "\n\n a", "a\n ", " \n",
    "\n \n\t a\r\n", "tab\tseparated\t\tvalues", "it's they're I've I'm we'll he'd can't",
    "IT'S THEY'RE I'VE 'S 'T ''s", "it'ſ we'LL", "123 456 7 1234567890 3.14 1,000 ½ ² Ⅷ ٣ १२३",
    "x1y2z3 4a 5 b6", "snake_case camelCase HTTPServer XMLHttp", "!!! ??? ... --- /// ===\n\n/",
    "https://example.com/a?b=c&d=%20#e", "fn main() { println!(\"{}\", x); }\n    let y = 5;\n",
    "\u0000\u0001\u007f", "\u00a0a\u00a0\u00a0b", "a\u2003\u2003x\u3000y \u3000 z", "\u200bzero\u200dwidth\ufeff",
    "naïve café Ångström straße", "e\u0301te\u0301 a\u0308\u0301 \u212b \u1100\u1161\u11a8 \u0958",
    "Ελληνικά Русский язык עברית العربية हिन्दी ไทย 한국어 日本語カタカナ",
    "中文文本，没有空格。第二句！" + CHINESE[0], "中 文 1 个 abc中文def", "😀😃 👨‍👩‍👧‍👦 🇨🇳 👍🏽",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𠀀𠀁", "\ufffd\U0010ffff\ue000", " \u0301a1\u03012", "▁a ▁▁b▁ ▁", "a ▁b", "<0x41><0x0A>",
    "a<|endoftext|>b <|endoftext|>", "<s>a</s> b</s>", "  <mask>  x <mask>y", "word tool toolbox tools",
    "x <left>  y", "x  <right>  y", "caf\u00e9tok cafe\u0301tok", "<|endoftext|", "<|endoftext|><|endoftext|>",
    "<s>", " <s> ", "[CLS] Hello [SEP] unaffable", "a" * 70, "-=" * 40, " " * 40 + "x", "的" * 70,
]

SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]


def more(tokenizer):
    tokenizer.add_tokens([
        AddedToken("<mask>", lstrip=True, normalized=False, special=True),
        AddedToken("tool", single_word=True, normalized=True),
        AddedToken("<left>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("<right>", rstrip=True, normalized=True),
        AddedToken("caf\u00e9tok", normalized=True),
    ])


def byte_level(text, split, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=["<|endoftext|>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def splits(*regexes, behavior="isolated", invert=False):
    cut = [pre.Split(Regex(regex), behavior, invert=invert) for regex in regexes]
    return pre.Sequence([*cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def characters(text):
    """A model as SentencePiece's BPE is converted to: characters, and bytes for the others."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False,
        limit_alphabet=120,
    )
    tokenizer.train_from_iterator(text, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]
    # Spaces in a row, as Llama 2's vocabulary has them.
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    vocab["▁▁"] = len(vocab)
    vocab["▁▁▁▁"] = len(vocab)
    merges += [["▁", "▁"], ["▁▁", "▁▁"]]
    made["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer


def spaces(strip):
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )


def families(text):
    yield "gpt2", byte_level(text, pre.ByteLevel(add_prefix_space=False))
    roberta = byte_level(text, pre.ByteLevel(add_prefix_space=True))
    roberta.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    more(roberta)
    yield "roberta", roberta
    llama3 = byte_level(text, splits(LLAMA3), ignore_merges=True)
    template = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    llama3.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    yield "llama3", llama3
    qwen2 = byte_level(text, splits(QWEN2))
    qwen2.normalizer = normalizers.NFC()
    qwen2.post_processor = processors.ByteLevel(trim_offsets=False)
    more(qwen2)
    yield "qwen2", qwen2
    yield "o200k", byte_level(text, splits(O200K, behavior="removed", invert=True))
    yield "deepseek", byte_level(text, splits(*DEEPSEEK))
    llama2 = characters(text)
    llama2.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    llama2.decoder = spaces(strip=True)
    yield "llama2", llama2
    mistral = characters(text)
    mistral.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    mistral.decoder = spaces(strip=True)
    more(mistral)
    yield "mistral", mistral
    gemma = characters(text)
    gemma.normalizer = normalizers.Replace(" ", "▁")
    gemma.pre_tokenizer = pre.Split(" ", "merged_with_previous")
    gemma.decoder = spaces(strip=False)
    yield "gemma", gemma
    split = characters(text)
    split.pre_tokenizer = pre.Metaspace(prepend_scheme="always", split=True)
    split.decoder = spaces(strip=True)
    yield "metaspace", split
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    unigram.train_from_iterator([one for one in text if one.isascii()], trainer)
    unigram.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B", [("</s>", 1)])
    unigram.decoder = decoders.Metaspace()
    yield "unigram", unigram
    bert = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    bert.normalizer = normalizers.BertNormalizer(lowercase=True)
    bert.pre_tokenizer = pre.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    bert.train_from_iterator(text, trainer)
    bert.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    bert.decoder = decoders.WordPiece()
    yield "bert", bert


def of_tiktoken(merges):
    """One vocabulary in OpenAI's form and in Megatron's, and what tiktoken (0.14.0) and Megatron
    core (0.16.1) make of the texts, with each of their patterns."""
    import tiktoken
    import tiktoken_ext.openai_public as public

    megatron = megatron_tiktoken()
    byte_of = {char: byte for byte, char in pre_byte_chars().items()}
    made = [bytes([byte]) for byte in range(256)]
    made += [bytes(byte_of[char] for char in left + right) for left, right in merges]
    spelled = [base64.b64encode(token).decode() for token in made]
    with open("small.tiktoken", "w") as out:
        out.writelines(f"{token} {rank}\n" for rank, token in enumerate(spelled))
    with open("tekken.json", "w") as out:
        texts = [token.decode("utf-8", errors="ignore") or None for token in made]
        fields = zip(spelled, texts)
        json.dump([{"rank": i, "token_bytes": b, "token_str": s} for i, (b, s) in enumerate(fields)], out)
    public.load_tiktoken_bpe = lambda *_, **__: {}
    patterns = {name: getattr(public, f"{name}_base")()["pat_str"] for name in ["cl100k", "o200k"]}
    patterns["r50k"] = public.r50k_pat_str
    ranks = {token: rank for rank, token in enumerate(made)}
    expected = {}
    for name, pattern in patterns.items():
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        expected[name] = [encoding.encode_ordinary(one) for one in TEXTS]
    for name in ["v1", "v2"]:
        tokenizer = megatron.TikTokenTokenizer(
            "tekken.json", num_special_tokens=20, pattern=name, vocab_size=20 + len(made)
        )
        expected[name] = [tokenizer.text_to_ids(one) for one in TEXTS]
    return expected


def megatron_tiktoken():
    """Megatron's module, without the packages around it, which want torch."""
    import importlib
    import importlib.util
    import pathlib
    import types

    root = pathlib.Path(importlib.util.find_spec("megatron").submodule_search_locations[0])
    folder = root / "core/tokenizers/text/libraries"
    for name, path in [("megatron", root), ("megatron.core", root / "core"), ("libraries", folder)]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    sys.modules["megatron.core.utils"] = types.ModuleType("utils")
    sys.modules["megatron.core.utils"].log_single_rank = lambda *_, **__: None
    return importlib.import_module("libraries.tiktoken_tokenizer")


def pre_byte_chars():
    """From byte to the character that stands for it."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    chars = {byte: chr(byte) for byte in kept}
    return chars | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def main(corpus):
    with open(corpus, "rb") as packed:
        lines = zstandard.ZstdDecompressor().stream_reader(packed).read().splitlines()
    text = [json.loads(line)["text"] for line in lines[:400]] + CHINESE * 20
    expected = {"texts": TEXTS}
    for name, tokenizer in families(text):
        with open(f"{name}.json", "w", encoding="utf-8") as out:
            out.write(tokenizer.to_str() + "\n")
        with_specials = [tokenizer.encode(one).ids for one in TEXTS]
        expected[name] = {
            "ids": with_specials,
            "plain": [tokenizer.encode(one, add_special_tokens=False).ids for one in TEXTS],
            "decoded": [tokenizer.decode(ids, skip_special_tokens=False) for ids in with_specials],
        }
        if name == "llama3":
            expected["tiktoken"] = of_tiktoken(json.loads(tokenizer.to_str())["model"]["merges"])
    with open("expected.json", "w", encoding="utf-8") as out:
        out.write(json.dumps(expected, ensure_ascii=True, separators=(",", ":")).replace("]],", "]],\n") + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
