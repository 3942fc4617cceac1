"""Corpora that the tests read, and the handling of Ctrl-C that they need."""

import json
import random
import signal

import pytest

import feedline

# A shell starts programs in the background with SIGINT ignored. Python then installs no handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = "the cat sat on a mat and the dog ran to the big red house while it was raining".split()


def write_documents(path, count, seed):
    """Documents of 1 to 120 words, one of them empty."""
    numbers = random.Random(seed)
    with path.open("w") as out:
        for document in range(count):
            words = 0 if document == 7 else numbers.randrange(1, 120)
            text = " ".join([*numbers.choices(WORDS, k=words), f"{document}"])
            out.write(json.dumps({"text": text if words else ""}) + "\n")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The prefix of a GPT corpus of some 40,000 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = write_documents(folder / "lines.jsonl", 600, seed=1)
    feedline.preprocess(lines, folder / "corpus", append_eod=True, progress=False)
    return str(folder / "corpus_text_document")


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory):
    """Another corpus of the same kind."""
    folder = tmp_path_factory.mktemp("other")
    lines = write_documents(folder / "lines.jsonl", 300, seed=2)
    feedline.preprocess(lines, folder / "other", append_eod=True, progress=False)
    return str(folder / "other_text_document")
