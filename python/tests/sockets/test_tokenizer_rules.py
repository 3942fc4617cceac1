"""The classes of transformers that have another rule than the tokenizer.json beside them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

import feedline

TEXTS = [
    "of 1234 the 12 people in 2024",
    " the people ",
    "  two  spaces   and more    ",
    "cafe\u0301 caf\u00e9 A\u030a \u1e9b\u0323 na\u00efve \ufb01n",
    "Hello HELLO hello \u0130 \u03a3\u03b1\u03c2",
    "\u4e2d\u56fd \u65e5\u672c\u8a9e\u3001 \uff21\uff22\uff23 \u00bd \u30ac",
    "one\n two\n\n three\t four\r\n five\n",
    "don't we'll 'S ``quoted'' (x[0])!= 3.5e-7",
    "\u2581the \u2581 <s> </s> <unk> [CLS] [MASK] <mask> x<pad>y <|endoftext|> z",
    "a <x> b<y> c the <extra_id_1> <eop>",
    "q\U0001f600 \u200d\U0001f468\u200d\U0001f469 \u00a0\u3000 \x07end",
    "",
    " ",
    "\n",
]
CORPUS = 4 * [
    "the quick brown fox 1234 12 2024 hello world Hello HELLO of the people",
    "caf\u00e9 na\u00efve \u00fcber e\u0301 a\u0300 \u4e2d\u56fd \u65e5\u672c \u4e2d\u6587",
    "  two  spaces, don't we'll ``quoted'' \n\n new\tline",
]
END = "<|endoftext|>"
ROBERTA = ["<s>", "<unk>", "</s>", "<pad>", "<mask>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ALBERT = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]


def trained(tokenizer: Tokenizer, trainer: Any) -> dict[str, Any]:
    tokenizer.train_from_iterator(CORPUS, trainer)
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return made


def byte_level(specials: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made = trained(tokenizer, trainer)
    digits = {"type": "Digits", "individual_digits": True}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, made["pre_tokenizer"]]}
    return made


def of_characters(specials: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(tokens) + 150, special_tokens=tokens, show_progress=False
    )
    made = trained(tokenizer, trainer)
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] in specials]
    made["model"].update(fuse_unk=True, byte_fallback=True)
    made["pre_tokenizer"]["prepend_scheme"] = "never"
    return made


def of_words(specials: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=specials, end_of_word_suffix="</w>", show_progress=False
    )
    return trained(tokenizer, trainer)


def wordpiece(specials: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token=specials[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=specials, show_progress=False
    )
    return trained(tokenizer, trainer)


def unigram(specials: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=specials, unk_token=specials[1], show_progress=False
    )
    return trained(tokenizer, trainer)


# Each class that is followed: how its vocabulary is made, and special tokens in it.
FOLLOWED: dict[str, tuple[Callable[[list[str]], dict[str, Any]], list[str]]] = {
    "AlbertTokenizer": (unigram, ALBERT),
    "BarthezTokenizer": (unigram, ROBERTA),
    "BartTokenizer": (byte_level, ROBERTA),
    "BertTokenizer": (wordpiece, BERT),
    "BlenderbotTokenizer": (byte_level, ROBERTA),
    "CamembertTokenizer": (unigram, ROBERTA),
    "CodeGenTokenizer": (byte_level, [END]),
    "CohereTokenizer": (byte_level, ["<PAD>", "<UNK>", "<BOS_TOKEN>"]),
    "DebertaTokenizer": (byte_level, BERT),
    "DebertaV2Tokenizer": (unigram, BERT),
    "DistilBertTokenizer": (wordpiece, BERT),
    "ElectraTokenizer": (wordpiece, BERT),
    "FunnelTokenizer": (wordpiece, ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>"]),
    "GemmaTokenizer": (of_characters, ["<pad>", "<eos>", "<bos>", "<unk>"]),
    "GPT2Tokenizer": (byte_level, [END]),
    "GPTNeoXTokenizer": (byte_level, [END]),
    "HerbertTokenizer": (of_words, ROBERTA),
    "LayoutLMTokenizer": (wordpiece, BERT),
    "LEDTokenizer": (byte_level, ROBERTA),
    "LlamaTokenizer": (of_characters, ["<unk>", "<s>", "</s>"]),
    "LongformerTokenizer": (byte_level, ROBERTA),
    "LxmertTokenizer": (wordpiece, BERT),
    "MobileBertTokenizer": (wordpiece, BERT),
    "MPNetTokenizer": (wordpiece, ["<s>", "[UNK]", "</s>", "<pad>", "<mask>"]),
    "MvpTokenizer": (byte_level, ROBERTA),
    "OpenAIGPTTokenizer": (of_words, ["<unk>"]),
    "Phi3Tokenizer": (of_characters, ["<unk>", "<s>", "</s>"]),
    "Qwen2Tokenizer": (byte_level, [END]),
    "Qwen3_5Tokenizer": (byte_level, [END]),
    "RobertaTokenizer": (byte_level, ROBERTA),
    "SqueezeBertTokenizer": (wordpiece, BERT),
    "T5Tokenizer": (unigram, ["<pad>", "</s>", "<unk>"]),
    "XLMRobertaTokenizer": (unigram, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
    "XLNetTokenizer": (unigram, ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>"]),
}


def token(content: str, **flags: bool) -> dict[str, Any]:
    default = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **default, "special": True, **flags}


# What tokenizer_config.json may say besides the class.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_prefix_space": True, "legacy": True},
    {"add_prefix_space": False, "do_lower_case": False, "strip_accents": True},
    {"do_lower_case": True, "keep_accents": True, "strip_accents": False, "split_by_punct": True},
    {"tokenize_chinese_chars": False, "keep_accents": False, "clean_text": False, "unk_id": 2},
    {"pad_token": None, "extra_special_tokens": ["<x>"], "extra_ids": 3},
    {"additional_special_tokens": ["<x>"], "image_token": "<y>", "mask_token": "<m>"},
    {
        "added_tokens_decoder": {
            "1": token("<y>", lstrip=True),
            "5": token(END, lstrip=True),
            "7": token("the", special=False, single_word=True, normalized=True),
        }
    },
]


def write(folder: Path, tokenizer: dict[str, Any], config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_ids_of_a_class_are_those_of_autotokenizer(name: str, tmp_path: Path) -> None:
    make, specials = FOLLOWED[name]
    tokenizer = make(specials)
    for number, settings in enumerate(SETTINGS):
        folder = write(tmp_path / str(number), tokenizer, {"tokenizer_class": name, **settings})
        library = AutoTokenizer.from_pretrained(folder)
        differs = False
        for around in (False, True):
            ours = feedline.Tokenizer(folder, tokenizer_rule="class", add_special_tokens=around)
            of_file = feedline.Tokenizer(folder, tokenizer_rule="file", add_special_tokens=around)
            for text in TEXTS:
                expected = library.encode(text, add_special_tokens=around)
                assert ours.encode(text) == expected, (name, settings, around, text)
                differs = differs or of_file.encode(text) != expected
        assert ours.vocab_size == 1 + max(library.get_vocab().values()), (name, settings)
        if differs:
            with pytest.raises(ValueError, match="--tokenizer-rule class"):
                feedline.Tokenizer(folder, add_special_tokens=True)
    assert differs, f"the file's rule for {name} is no other one"


def with_another_rule(made: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose rule is that of no class."""
    made["normalizer"] = {"type": "Lowercase"}
    return made


def classes_of_the_release() -> dict[str, bool]:
    """The classes of models in the installed release, and whether each reads tokenizer.json.

    They are found in the source, because some need a package to be imported.
    """
    bases: dict[str, list[str]] = {}
    builds = set()
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                if "__init__" in members:
                    builds.add(node.name)

    def line(name: str) -> list[str]:
        return [name] + [one for base in bases.get(name, []) for one in line(base)]

    generic = {"TokenizersBackend", "PreTrainedTokenizerFast"}
    others = {"PythonBackend", "PreTrainedTokenizer", "SentencePieceBackend"}
    return {
        name: bool(generic & set(line(name))) and not builds & set(line(name))
        for name in bases
        if (generic | others) & set(line(name)) and "Tokenizer" in name
    }


def test_every_class_of_the_release_is_known(tmp_path: Path) -> None:
    """A class that builds its own tokenizer must be followed, or refused by name."""
    found = classes_of_the_release()
    assert len(found) > 80 and not found["GPT2Tokenizer"] and found["ParakeetTokenizer"], found
    # LlamaTokenizer reads a byte-level file.
    tokenizer = with_another_rule(of_characters(["<unk>"]))
    unknown = []
    for name, reads_file in found.items():
        folder = write(tmp_path / name, tokenizer, {"tokenizer_class": name})
        try:
            feedline.Tokenizer(folder)
            refused = ""
        except ValueError as error:
            refused = str(error)
        if bool(refused) == reads_file or (refused and name.removesuffix("Fast") not in refused):
            unknown.append((name, reads_file, refused))
    assert not unknown, f"classes that table.rs does not know: {unknown}"
    followed = [name for name, reads_file in found.items() if name in FOLLOWED]
    assert len(followed) > 20


def test_the_class_of_a_folder_is_that_of_autotokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the type of the model and the class that the folder names, of all registered types."""
    chosen: list[type] = []

    def from_pretrained(cls: type, *_: Any, **__: Any) -> None:
        chosen.append(cls)

    base = transformers.PreTrainedTokenizerBase
    monkeypatch.setattr(base, "from_pretrained", classmethod(from_pretrained))
    tokenizer = with_another_rule(byte_level([END]))
    wrong = []
    types = dict.fromkeys([*tokenization_auto.TOKENIZER_MAPPING_NAMES, "llama", "none-such"])
    for kind in types:
        for named in (None, "GPT2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"):
            config = {} if named is None else {"tokenizer_class": named}
            folder = write(tmp_path / "folder", tokenizer, config)
            (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": kind}))
            chosen.clear()
            try:
                AutoTokenizer.from_pretrained(folder)
            except (ImportError, AttributeError, ValueError):
                continue  # needs a package that is not here
            expected = chosen[0].__name__ if chosen else ""
            try:
                feedline.Tokenizer(folder)
                found = ""
            except ValueError as error:
                found = str(error)
            reads_file = expected in ("TokenizersBackend", "ParakeetTokenizer")
            if expected and (reads_file != (not found) or (found and expected not in found)):
                wrong.append((kind, named, expected, found))
    assert not wrong, wrong[:5]
