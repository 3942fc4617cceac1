"""Steps of Hugging Face's Trainer, compared with a run that was not interrupted."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import trainer_steps
import transformers
from protocols import assert_known
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from trainer_steps import SAVE_STEPS, STEPS, lora_model, run, tiny_model, weights, weights_of
from transformers import AutoModelForCausalLM

import feedline.transformers
from feedline import StepExistsError, ckpt
from feedline._values import decoded, encoded
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


def run_two_ranks(folder: Path, start: Callable[..., Any], *kinds: str) -> None:
    options = (2, folder / "store", *kinds)
    programs = [start(trainer_steps.__file__, folder, rank, *options) for rank in range(2)]
    for program in programs:
        program.output()


def test_two_ranks_resume_bit_for_bit(tmp_path: Path, start: Callable[..., Any]) -> None:
    run_two_ranks(tmp_path, start, "replicas", "sharded")
    # One rank loads what two have saved: replicas, or shards of FSDP2.
    for kind in ("replicas", "sharded"):
        step = step_folder(tmp_path / kind / "whole", SAVE_STEPS)
        found = run(tmp_path / kind / "alone", resume=step)
        assert list(found[0]) == list(range(SAVE_STEPS + 1, STEPS + 1))


def test_transformers_opens_pieces_of_two_ranks(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    run_two_ranks(tmp_path, start, "pieces")


def test_peft_opens_sharded_adapters(tmp_path: Path, start: Callable[..., Any]) -> None:
    pytest.importorskip("peft", reason="needs peft 0.21")
    run_two_ranks(tmp_path, start, "adapters")


POSITIONS = 18
"""Those of a sample, and of virtual tokens."""


def adapters(kind: str) -> Any:
    """A model with adapters of PEFT."""
    import peft

    torch.manual_seed(1)
    lora = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    config: Any = peft.LoraConfig(**lora)
    if kind == "modules_to_save":
        return lora_model()
    if kind == "inside":
        model = tiny_model()
        try:
            model.add_adapter(config)
        except ValueError as error:
            pytest.skip(f"transformers adds no adapters with peft {peft.__version__}: {error}")
        return model
    if kind == "parameters":
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["attn.c_attn.weight"])
    if kind == "prompt":
        config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(POSITIONS), config)
    if kind == "two":
        model.add_adapter("other", peft.LoraConfig(**lora))
    return model


@pytest.mark.parametrize(
    "kind", ["lora", "modules_to_save", "two", "inside", "parameters", "prompt"]
)
def test_peft_opens_a_step(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft", reason="needs peft 0.21")
    options: dict[str, Any] = {"max_steps": 6, "save_steps": 3}
    theirs = {"trainer_type": transformers.Trainer, **options}
    losses, trainer = run(tmp_path / "theirs", model=adapters(kind), **theirs)
    found, ours = run(tmp_path / "ours", model=adapters(kind), **options)
    assert found == losses and torch.equal(weights(ours), weights(trainer))
    step, checkpoint = step_folder(tmp_path / "ours", 6), tmp_path / "theirs" / "checkpoint-6"
    saved = sorted(checkpoint.rglob("adapter_*"))
    assert len(saved) == (4 if kind == "two" else 2)
    for path in saved:
        mine = step / path.relative_to(checkpoint)
        if path.suffix == ".json":
            assert json.loads(mine.read_text()) == json.loads(path.read_text())
        else:
            expected, tensors = load_file(path), load_file(mine)
            assert list(tensors) == list(expected)
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    # The base model is not in it, as in a checkpoint of transformers.
    assert not [name for _, name in ckpt.open(step).keys() if "c_fc" in name]
    base = tiny_model(16 if kind in ("inside", "modules_to_save") else POSITIONS)
    opened = peft.PeftModel.from_pretrained(base, step).eval()
    if kind != "inside":  # whose modules have other names
        assert torch.equal(opened(torch.arange(4)[None]).logits, logits_of(trainer))
    (step_folder(tmp_path / "ours", 3) / "adapter_config.json").unlink()
    resume = step_folder(tmp_path / "ours", 3)
    resumed = run(tmp_path / "resumed", model=adapters(kind), resume=resume, **options)
    assert resumed[0] == {number: losses[number] for number in (4, 5, 6)}
    assert torch.equal(weights(resumed[1]), weights(trainer))
    assert (resume / "adapter_config.json").exists()


def logits_of(trainer: Any) -> torch.Tensor:
    model = trainer.model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(4)[None]).logits
    return logits


def test_adapters_that_peft_could_not_open_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft 0.21")
    model = adapters("lora")
    block = model.base_model.model.transformer.h
    block[0] = torch.compile(block[0], backend="eager")
    with pytest.raises(ValueError, match="expected no compiled module inside"):
        run(tmp_path, model=model)
    assert get_last_checkpoint(tmp_path) is None


def test_adapters_that_are_not_saved_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft 0.21")
    model = adapters("inside")
    model.add_adapter(next(iter(model.peft_config.values())), "other")
    model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="saving multiple active adapters"):
        run(tmp_path, model=model)
    assert get_last_checkpoint(tmp_path) is None


def compiled(kind: str) -> Any:
    model = tiny_model()
    if kind == "block":
        model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="eager")
    return torch.compile(model, backend="eager") if kind == "model" else model


@pytest.mark.parametrize("kind", ["model", "block", "option"])
def test_a_compiled_model_opens_and_resumes(whole: Any, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"remove_unused_columns": False}
    if kind == "option":
        options.update(torch_compile=True, torch_compile_backend="eager")
    run(tmp_path / "first", model=compiled(kind), **options)
    opened = AutoModelForCausalLM.from_pretrained(step_folder(tmp_path / "first", STEPS))
    assert torch.equal(weights_of(opened), whole[2])
    step = step_folder(tmp_path / "first", SAVE_STEPS)
    found = run(tmp_path / "second", model=compiled(kind), resume=step, **options)
    assert_resumes(whole, found, SAVE_STEPS)
    # The names do not depend on the wrapper.
    assert_resumes(whole, run(tmp_path / "plain", resume=step), SAVE_STEPS)


def test_a_tensor_above_the_size_of_a_file_is_complete(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedline.transformers, "_FILE_BYTES", 1000)
    run(tmp_path, max_steps=2, save_steps=2)
    assert len(list(step_folder(tmp_path, 2).glob("model-*.safetensors"))) > 1
    AutoModelForCausalLM.from_pretrained(step_folder(tmp_path, 2))


@pytest.mark.parametrize("mask", [0o077, 0o007, 0o002])
def test_files_have_the_modes_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run(tmp_path / "run", max_steps=1, save_steps=1)
    finally:
        os.umask(before)
    files = [path for path in step_folder(tmp_path / "run", 1).rglob("*") if path.is_file()]
    assert {"config.json", "trainer_state.json"} < {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


def optimizers(kind: str, model: Any) -> tuple[Any, Any]:
    options: dict[str, Any] = {"lr": 0.01}
    if kind == "tensors":
        options = {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.9), torch.tensor(0.99))}
        options["foreach"] = False
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    if kind == "tensors":
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 7])


@pytest.mark.parametrize("kind", ["counter", "tensors"])
def test_schedules_and_tensors_of_an_optimizer_resume(tmp_path: Path, kind: str) -> None:
    def trained(folder: str, **options: Any) -> Any:
        model = tiny_model()
        given = {"optimizers": optimizers(kind, model)}
        return run(tmp_path / folder, model=model, trainer_options=given, **options)

    losses, expected = trained("theirs", trainer_type=transformers.Trainer)
    found, _ = trained("whole")
    assert found == losses
    resumed = trained("resumed", resume=step_folder(tmp_path / "whole", SAVE_STEPS))
    assert_resumes((None, losses, weights(expected)), resumed, SAVE_STEPS)
    for group in resumed[1].optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor) == (kind == "tensors")


class Color(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    first: float
    second: float


class Text(str):
    pass


class Map(dict[str, int]):
    pass


REFUSED = [Color.RED, Pair(0.9, 0.99), Text("a"), Map(a=1)]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_values_of_other_classes_are_refused_before_the_run(tmp_path: Path, value: Any) -> None:
    model = tiny_model()
    optimizer, schedule = optimizers("counter", model)
    optimizer.param_groups[0]["extra"] = value
    given = {"optimizers": (optimizer, schedule)}
    before = weights_of(model).clone()
    text = r"param_groups\[0\].extra.*found .*" + type(value).__name__
    with pytest.raises(ValueError, match=text):
        run(tmp_path, model=model, trainer_options=given)
    assert torch.equal(weights_of(model), before)
    # transformers saves it, but does not load it either.
    torch.save(value, tmp_path / "value.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / "value.pt", weights_only=True)


class Odd(torch.optim.SGD):
    """An optimizer whose state has a value that cannot be stored."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().step(*args, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["color"] = Color.RED
        return found


def test_values_that_the_first_step_creates_are_refused_after_it(tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = Odd(model.parameters(), lr=0.1)
    given = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}
    with pytest.raises(ValueError, match=r"optim.state.*color.*found .*Color"):
        run(tmp_path, model=model, trainer_options=given)


def equal(found: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return found.dtype == value.dtype and torch.equal(found, value)
    if isinstance(value, dict):
        items = list(zip(found.items(), value.items(), strict=True))
        return all(equal(a, c) and equal(b, d) for (a, b), (c, d) in items)
    if isinstance(value, list | tuple):
        return all(map(equal, found, value)) and len(found) == len(value)
    return type(found) is type(value) and found == value


VALUES = [
    collections.Counter({4: 2, "$a": 1, 9: 0, -1: -3}),
    collections.OrderedDict([("b", 1), ("a", (2.5, None))]),
    collections.defaultdict(list, {1: [2], "x": []}),
    collections.defaultdict(None, {"a": {"b": True}}),
    collections.deque([1, (2,)], maxlen=3),
    collections.deque([], maxlen=None),
    torch.__version__,
    torch.tensor(0.1, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.arange(6).view(2, 3).t(),
    (torch.tensor(True), torch.tensor([1 + 2j])),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_are_read_as_they_were_saved(value: Any) -> None:
    found = decoded(json.loads(json.dumps(encoded(value, "value", False))), "value", False)
    assert type(found) is type(value) and equal(found, value)
    for name in ("default_factory", "maxlen"):
        assert getattr(found, name, None) == getattr(value, name, None)


@pytest.mark.parametrize(
    "value",
    [
        *REFUSED,
        collections.defaultdict(lambda: 1),
        torch.zeros(1 << 18 | 1),
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_could_not_be_read_as_saved_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot save 'value"):
        encoded(value, "value", False)


SCHEDULES: dict[str, Any] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 1, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "PolynomialLR": {},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "ReduceLROnPlateau": {},
    "LambdaLR": {"lr_lambda": lambda step: 1.0},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_is_saved(name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULES[name])
    optimizer.step()
    schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    state = schedule.state_dict()
    found = decoded(json.loads(json.dumps(encoded(state, "state", False))), "state", False)
    assert equal(found, state)


@pytest.mark.parametrize("option", ["push_to_hub", "save_on_each_node"])
def test_options_that_steps_cannot_follow_are_refused(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda *_, **__: None)
    with pytest.raises(ValueError, match=f"cannot use {option}: expected False"):
        run(tmp_path, **{option: True})


def test_options_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path))
    feedline.transformers._check_options(arguments)
    arguments.save_strategy = "minutes"
    with pytest.raises(ValueError, match="cannot use save_strategy: .*found minutes"):
        feedline.transformers._check_options(arguments)


def test_a_new_option_that_is_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass
    class Newer(transformers.TrainingArguments):
        save_compressed: bool = False

    monkeypatch.setattr(transformers, "TrainingArguments", Newer)
    feedline.transformers._check_options(Newer(str(tmp_path)))
    with pytest.raises(ValueError, match="cannot use save_compressed: .*found True"):
        feedline.transformers._check_options(Newer(str(tmp_path), save_compressed=True))


def test_a_smaller_batch_does_not_skip_its_saves(tmp_path: Path) -> None:
    # The second attempt, with a smaller batch, must not take the step of the first for its own.
    class Large(feedline.transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == 3 and self._train_batch_size == 4:
                raise RuntimeError("CUDA out of memory.")
            found: torch.Tensor = super().training_step(*args, **kwargs)
            return found

    with pytest.raises(CheckpointException, match="exists"):
        run(tmp_path, trainer_type=Large, save_steps=2, auto_find_batch_size=True)


def test_a_save_on_request_ends_the_run(whole: Any, tmp_path: Path) -> None:
    class Requested(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 7:
                trainer.jit_manager.is_checkpoint_requested = True

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal trainer
            handlers = made[0].callback_handler.callbacks
            trainer = next(each for each in handlers if type(each).__name__.startswith("JIT"))
            if is_at_start:
                trainer.jit_manager.is_checkpoint_requested = True

    class Made(feedline.transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made[:] = [self]
            self.add_callback(Requested())

    made: list[Any] = []
    trainer: Any = None
    is_at_start = False
    options: dict[str, Any] = {"trainer_type": Made, "enable_jit_checkpoint": True}
    run(tmp_path, **options)
    assert [step["step"] for step in ckpt.ls(tmp_path)["steps"]] == [SAVE_STEPS, 7]
    # A request before the first step finds the step that the run has resumed from.
    is_at_start = True
    run(tmp_path, resume=True, **options)
    assert_resumes(whole, run(tmp_path, resume=True), 7)


METHODS = {
    "train(resume_from_checkpoint, trial, ignore_keys_for_eval)",
    "_inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)",
    "_save_checkpoint(model, trial)",
    "_load_from_checkpoint(resume_from_checkpoint, model)",
    "_load_best_model()",
    "_load_optimizer_and_scheduler(checkpoint)",
    "_load_scaler(checkpoint)",
    "_load_rng_state(checkpoint)",
}
"""The methods of `transformers.Trainer` that `SavesSteps` replaces."""

CALLED = {
    "_get_output_dir(trial)",
    "store_flos()",
    "add_callback(callback)",
}
"""Those that it calls."""

OTHERS = {
    "_finish_current_push",
    "_get_dataloader",
    "_issue_warnings_after_load",
    "_load_callback_state",
    "_maybe_log_save_evaluate",
    "_push_from_checkpoint",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_save_scaler",
    "_tune_save_checkpoint",
    "get_eval_dataloader",
    "get_test_dataloader",
    "get_train_dataloader",
    "push_to_hub",
    "save_metrics",
    "save_model",
    "save_state",
}
"""Those that save or load, and that need no change."""

OPTIONS = {
    *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
    *("enable_jit_checkpoint", "resume_from_checkpoint", "restore_callback_states_from_checkpoint"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
    *("hub_always_push", "hub_revision", "trackio_bucket_id"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("ignore_data_skip", "full_determinism", "seed", "data_seed", "auto_find_batch_size"),
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_in_order"),
    *("dataloader_multiprocessing_context", "train_sampling_strategy", "length_column_name"),
    *("remove_unused_columns", "fsdp", "fsdp_config", "deepspeed"),
    *("accelerator_config", "parallelism_config"),
}
"""Options that decide what is saved, where, how it is sharded, and the order of the data."""

OPTION_WORDS = (
    *("save", "checkpoint", "hub", "push", "best", "better", "bucket_id", "skip_", "data_skip"),
    *("seed", "determinism", "dataloader", "sampl", "length", "column", "fsdp", "deepspeed"),
    *("accelerator", "parallelism", "find_batch"),
)


def signature(name: str) -> str:
    found = inspect.signature(getattr(transformers.Trainer, name)).parameters
    return f"{name}({', '.join(list(found)[1:])})"


def test_the_protocol_of_transformers_is_known() -> None:
    replaced = {method.partition("(")[0] for method in METHODS}
    own = set(vars(feedline.transformers.SavesSteps)) & set(dir(transformers.Trainer))
    # Python gives every class of Python these.
    own -= {name for name in own if name.startswith("__")}
    assert own == replaced
    assert_known(map(signature, replaced), METHODS, "methods of Trainer that are replaced")
    called = {method.partition("(")[0] for method in CALLED}
    assert_known(map(signature, called), CALLED, "methods of Trainer that are called")
    words = ("save", "load", "push", "checkpoint")
    saves = {name for name in dir(transformers.Trainer) if any(word in name for word in words)}
    assert_known(saves - replaced, OTHERS, "methods of Trainer that save or load")


def test_the_options_of_transformers_are_known() -> None:
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    found = {name for name in names if any(word in name for word in OPTION_WORDS)}
    assert_known(found, OPTIONS | {"skip_memory_metrics"}, "options of TrainingArguments")
    strategies = {str(each.value) for each in transformers.trainer_utils.SaveStrategy}
    known = feedline.transformers._SAVE_STRATEGIES
    assert_known(strategies, known, "values of save_strategy")
    with pytest.raises(AssertionError, match=r"options: new \['b'\], gone \['a'\]"):
        assert_known(["b"], ["a"], "options")


def test_the_protocol_of_peft_is_known() -> None:
    peft = pytest.importorskip("peft", reason="needs peft 0.21")
    parameters = inspect.signature(peft.PeftModel.save_pretrained).parameters
    known = {"self", "save_directory", "safe_serialization", "selected_adapters", "kwargs"}
    known |= {"save_embedding_layers", "is_main_process"}
    known |= {"path_initial_model_for_weight_conversion"}
    assert_known(parameters, known, "parameters of PeftModel.save_pretrained")
    parameters = inspect.signature(peft.get_peft_model_state_dict).parameters
    known = {"model", "state_dict", "adapter_name", "unwrap_compiled", "save_embedding_layers"}
    assert_known(parameters, known, "parameters of get_peft_model_state_dict")
