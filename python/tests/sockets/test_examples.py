"""Every example runs, and has at most five lines for Feedline."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {
    "nanogpt.py": "iter 20: loss",
    "hf_trainer.py": "'train_loss'",
    "lightning_fit.py": "after 80 samples",
    "grain_batches.py": "resumed after 40 samples",
    "torchtitan_loader.py": "after 48 samples",
    "torchtitan_checkpoint.py": "resumed after step 5 with the same losses",
    "megatron_core.py": "iteration 20: lm loss",
    "nanogpt_checkpoint.py": "iter 20: loss",
    "hf_trainer_checkpoint.py": "opened ",
    "megatron_checkpoint.py": "resumed from ",
}
HELPERS = {"demo_corpus.py", "tiny_model.py"}


def test_each_example_has_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*RUNS, *HELPERS}


@pytest.mark.parametrize("name", RUNS)
def test_at_most_five_lines_are_for_feedline(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    ours = [line for line in lines if line.endswith("# feedline")]
    assert 1 <= len(ours) <= 5
    # All lines of code that name Feedline are marked.
    code = [line for line in lines if re.search(r"\bfeedline\.|CausalLMDataset\(", line)]
    code = [line for line in code if "``" not in line and "python " not in line]
    assert all(line in ours for line in code), code


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs(
    corpus: str, tmp_path: Path, start: Callable[..., Any], name: str
) -> None:
    output = start(EXAMPLES / name, corpus, f"--out={tmp_path}").output()
    assert RUNS[name] in output


def test_an_example_creates_its_own_corpus(start: Callable[..., Any]) -> None:
    assert "tokens (4, 64)" in start(EXAMPLES / "grain_batches.py").output()


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("iter ")]


@pytest.mark.parametrize("name", ["nanogpt.py", "nanogpt_checkpoint.py"])
def test_nanogpt_resumes_bit_for_bit(
    corpus: str, tmp_path: Path, start: Callable[..., Any], name: str
) -> None:
    def run(folder: str, *options: str) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        program = start(EXAMPLES / name, corpus, f"--out={tmp_path / folder}", *options)
        return losses(program.output())

    whole = run("whole")
    parts = run("parts", "--max_iters=10") + run("parts", "--init_from=resume")
    assert len(whole) == 20 and parts == whole


def test_both_megatron_loaders_read_the_same(
    corpus: str, tmp_path: Path, start: Callable[..., Any]
) -> None:
    one, other = (
        start(EXAMPLES / "megatron_core.py", corpus, f"--out={tmp_path}", *options).output()
        for options in ([], ["--dataloader-type=external"])
    )
    assert "iteration 20" in one and one == other
