"""The corpus of an example: the first argument, or the text in demo/data, tokenized for it."""

import sys
import tempfile
from pathlib import Path

import feedline

TEXT = Path(__file__).parents[2] / "demo" / "data" / "corpus.jsonl.zst"
# Removed when the example ends.
_folder = tempfile.TemporaryDirectory()


def corpus_prefix() -> str:
    """The prefix of a ``.bin`` and ``.idx`` with GPT-2's tokens."""
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if names:
        return names[0]
    feedline.preprocess(TEXT, f"{_folder.name}/demo", append_eod=True, progress=False)
    return f"{_folder.name}/demo_text_document"


def output_folder() -> str:
    """The folder of ``--out=FOLDER``, or one that is removed at the end."""
    given = [argument[6:] for argument in sys.argv[1:] if argument.startswith("--out=")]
    return given[0] if given else _folder.name
