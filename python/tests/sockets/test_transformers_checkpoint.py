"""Steps of Hugging Face's Trainer, compared with a run that was not interrupted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_steps
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from trainer_steps import SAVE_STEPS, STEPS, run, tiny_model, weights
from transformers import AutoModelForCausalLM

import feedline.transformers
from feedline import StepExistsError, ckpt
from feedline.dcp import StorageWriter
from feedline.transformers import get_last_checkpoint, save_config

FEEDLINE = Path(sys.executable).with_name("feedline")
SAVED = [SAVE_STEPS, 2 * SAVE_STEPS, STEPS]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float], torch.Tensor]:
    """The folder, the losses and the weights of a run from start to end."""
    folder = tmp_path_factory.mktemp("whole")
    losses, trainer = run(folder)
    assert list(losses) == list(range(1, STEPS + 1))
    return folder, losses, weights(trainer)


def assert_resumes(whole: Any, found: tuple[dict[int, float], Any], step: int) -> None:
    _, losses, expected = whole
    assert found[0] == {number: losses[number] for number in range(step + 1, STEPS + 1)}
    assert torch.equal(weights(found[1]), expected)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_a_killed_run_resumes_bit_for_bit(
    whole: Any, tmp_path: Path, start: Callable[..., Any]
) -> None:
    program = start(trainer_steps.__file__, tmp_path, SAVE_STEPS + 3)
    program.wait_for("paused")
    wait_for(step_folder(tmp_path, SAVE_STEPS))
    program.kill()
    found = run(tmp_path, resume=True, trainer_options={"async_save": True})
    assert_resumes(whole, found, SAVE_STEPS)
    assert [step["step"] for step in ckpt.ls(tmp_path)["steps"]] == SAVED


@pytest.mark.parametrize("step", SAVED[:2])
def test_each_step_resumes_bit_for_bit(whole: Any, tmp_path: Path, step: int) -> None:
    assert_resumes(whole, run(tmp_path, resume=str(step_folder(whole[0], step))), step)
    assert get_last_checkpoint(tmp_path) == str(step_folder(tmp_path, STEPS))


def test_the_end_of_an_epoch_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = {"save_strategy": "epoch"}
    losses, trainer = run(tmp_path / "whole", **options)
    found = run(tmp_path / "other", resume=step_folder(tmp_path / "whole", 8), **options)
    assert_resumes((None, losses, weights(trainer)), found, 8)


def test_the_last_step_is_complete(whole: Any) -> None:
    folder = whole[0]
    command = [str(FEEDLINE), "ckpt", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    keys = ckpt.open(folder).keys()
    # The head is the embedding, which is stored once.
    assert ("exp_avg", "transformer.wte.weight") in keys
    assert ("model", "lm_head.weight") not in keys
    state = json.loads((step_folder(folder, STEPS) / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"]] == list(range(1, STEPS + 1))


def test_transformers_opens_a_step(whole: Any) -> None:
    folder, _, expected = whole
    model = AutoModelForCausalLM.from_pretrained(step_folder(folder, STEPS))
    assert torch.equal(torch.cat([v.flatten() for v in model.state_dict().values()]), expected)
    assert model.generation_config.eos_token_id == 0


def test_transformers_opens_a_step_of_dcp(tmp_path: Path) -> None:
    model = tiny_model().bfloat16()
    dcp.save({"model": model.state_dict()}, storage_writer=StorageWriter(tmp_path, 3))
    save_config(model, step_folder(tmp_path, 3))
    found = AutoModelForCausalLM.from_pretrained(step_folder(tmp_path, 3), dtype="auto")
    for name, value in model.state_dict().items():
        assert found.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(found.state_dict()[name], value)


def test_missing_files_of_a_killed_run_are_written(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(step_folder(whole[0], SAVE_STEPS), step_folder(tmp_path, SAVE_STEPS))
    names = ("trainer_state.json", "config.json", "generation_config.json")
    for name in names:
        (step_folder(tmp_path, SAVE_STEPS) / name).unlink()
    assert_resumes(whole, run(tmp_path, resume=True), SAVE_STEPS)
    assert all((step_folder(tmp_path, SAVE_STEPS) / name).exists() for name in names)


def test_steps_after_the_start_are_refused(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(StepExistsError, match=f"expected no step after 0, found {STEPS}"):
        run(whole[0])
    with pytest.raises(StepExistsError, match=f"after {SAVE_STEPS}, found {STEPS}"):
        run(whole[0], resume=str(step_folder(whole[0], SAVE_STEPS)))
    with pytest.raises(ValueError, match="No valid checkpoint"):
        run(tmp_path, resume=True)
    assert get_last_checkpoint(tmp_path / "none") is None


def test_checkpoints_of_transformers_resume(whole: Any, tmp_path: Path) -> None:
    run(tmp_path, trainer_type=transformers.Trainer, save_total_limit=5)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    assert_resumes(whole, run(tmp_path, resume=True), 2 * SAVE_STEPS)
    assert [step["step"] for step in ckpt.ls(tmp_path)["steps"]] == [STEPS]


def test_the_best_step_is_kept(tmp_path: Path) -> None:
    _, trainer = run(
        tmp_path,
        save_steps=2,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=True,  # the model gets better, so that an early step is the best
        load_best_model_at_end=True,
    )
    best = trainer.state.best_global_step
    steps = [step["step"] for step in ckpt.ls(tmp_path)["steps"]]
    assert steps == list(range(min(best, STEPS - 2), STEPS + 1, 2))
    assert trainer.state.best_model_checkpoint == str(step_folder(tmp_path, best))
    stored = ckpt.open(step_folder(tmp_path, best)).read("transformer.wte.weight")
    assert (trainer.model.transformer.wte.weight.detach().numpy() == stored).all()


def test_the_best_step_that_was_saved_is_loaded(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 3.0, 3: 1.0, 4: 4.0}

    class Evaluated(feedline.transformers.Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_loss": losses[self.state.global_step]}

    _, trainer = run(
        tmp_path,
        trainer_type=Evaluated,
        max_steps=4,
        save_steps=2,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    assert trainer.state.best_global_step == 3  # has no checkpoint
    assert trainer.state.best_model_checkpoint == str(step_folder(tmp_path, 2))
    assert [step["step"] for step in ckpt.ls(tmp_path)["steps"]] == [2, 4]


@pytest.mark.parametrize("optim", ["adafactor", "sgd"])
def test_other_optimizers_and_frozen_weights(tmp_path: Path, optim: str) -> None:
    def model() -> Any:
        made = tiny_model()
        made.transformer.wpe.weight.requires_grad = False
        return made

    options = {"optim": optim, "gradient_accumulation_steps": 2}
    losses, trainer = run(tmp_path / "whole", model=model(), **options)
    step = step_folder(tmp_path / "whole", SAVE_STEPS)
    found = run(tmp_path / "other", resume=str(step), model=model(), **options)
    assert_resumes((None, losses, weights(trainer)), found, SAVE_STEPS)


def test_a_failed_save_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(feedline.transformers.StorageWriter, "write_data", failing)
    for is_async in (False, True):
        with pytest.raises(CheckpointException, match="no disk"):
            run(tmp_path, trainer_options={"async_save": is_async})
    assert get_last_checkpoint(tmp_path) is None


def test_the_parameters_of_another_model_are_refused(whole: Any, tmp_path: Path) -> None:
    model = tiny_model()
    model.transformer.h[0].mlp.c_fc.bias.requires_grad = False
    with pytest.raises(ValueError, match=r"found others: transformer.h.0.mlp.c_fc.bias"):
        run(tmp_path, resume=str(step_folder(whole[0], SAVE_STEPS)), model=model)


def test_two_ranks_resume_bit_for_bit(tmp_path: Path, start: Callable[..., Any]) -> None:
    programs = [
        start(trainer_steps.__file__, tmp_path, rank, 2, tmp_path / "store") for rank in range(2)
    ]
    for program in programs:
        program.output()
    # One rank loads what two have saved: replicas, or shards of FSDP2.
    for kind in ("replicas", "sharded"):
        step = step_folder(tmp_path / kind / "whole", SAVE_STEPS)
        found = run(tmp_path / kind / "alone", resume=step)
        assert list(found[0]) == list(range(SAVE_STEPS + 1, STEPS + 1))
