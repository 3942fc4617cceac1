"""Fixtures: corpora of generated text, and programs that end within a time limit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Sums of floats depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

# Longer than any of these programs takes on a busy machine.
PROGRAM_SECONDS_MAX = 120


def write_texts(path: Path, *, documents: int, seed: int) -> None:
    """JSON lines of random words, 20 to 200 per document."""
    random_words = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random_words.choices(letters, k=length % 7 + 2)) for length in range(500)]
    with path.open("w") as file:
        for _ in range(documents):
            text = " ".join(random_words.choices(words, k=random_words.randint(20, 200)))
            file.write(json.dumps({"text": text}) + "\n")


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The prefixes of two corpora, of 200 and 120 documents that end with GPT-2's token 50256."""
    import feedline

    folder = tmp_path_factory.mktemp("corpora")
    for name, documents in (("first", 200), ("second", 120)):
        write_texts(folder / f"{name}.jsonl", documents=documents, seed=documents)
        feedline.preprocess(
            folder / f"{name}.jsonl",
            folder / name,
            tokenizer="gpt2",
            append_eod=True,
            progress=False,
        )
    return f"{folder}/first_text_document", f"{folder}/second_text_document"


@pytest.fixture(scope="session")
def corpus(corpora: tuple[str, str]) -> str:
    """The prefix of a corpus."""
    return corpora[0]


class Program:
    """A Python program that is killed at the end of the test."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, line: str) -> None:
        """Reads its output up to a line."""
        assert self._process.stdout is not None
        for found in self._process.stdout:
            if found.strip() == line:
                return
        raise AssertionError(f"found no line {line!r}: {self._process.communicate()[1]}")

    def kill(self) -> None:
        """Kills it without a chance to clean up."""
        self._process.send_signal(signal.SIGKILL)
        assert self._process.wait(PROGRAM_SECONDS_MAX) == -signal.SIGKILL

    def killed(self) -> None:
        """Waits until it has killed itself."""
        out, err = self._process.communicate(timeout=PROGRAM_SECONDS_MAX)
        assert self._process.returncode == -signal.SIGKILL, out + err

    def output(self) -> str:
        """Waits for its end and returns what it printed."""
        out, err = self._process.communicate(timeout=PROGRAM_SECONDS_MAX)
        assert self._process.returncode == 0, out + err
        return out

    def end(self) -> None:
        """Kills it, if it has not exited."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """A function that starts a Python program with the given arguments."""
    programs: list[Program] = []

    def start_program(*arguments: object) -> Program:
        programs.append(Program([str(argument) for argument in arguments]))
        return programs[-1]

    yield start_program
    for program in programs:
        program.end()
