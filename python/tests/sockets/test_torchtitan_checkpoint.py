"""torchtitan's checkpoint manager. Its trainer needs a newer PyTorch than 2.11 and is not run."""

from __future__ import annotations

import collections
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan_run
from protocols import assert_known, fields_of, parameters_of
from torchtitan.components import checkpoint
from torchtitan_run import Run, assert_equal

import feedline
import feedline.torchtitan
from feedline import ckpt
from feedline.torchtitan import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FEEDLINE = Path(sys.executable).with_name("feedline")


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, for saves in the background."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in ckpt.ls(folder / "ckpt")["steps"]]


def raised(failure: dcp.api.CheckpointException) -> BaseException:
    """The exception of a rank, from that of DCP."""
    ((exception, _),) = failure.failures.values()
    return exception


def test_a_run_resumes_bit_for_bit(corpus: str, tmp_path: Path) -> None:
    whole = Run(corpus, tmp_path / "whole", interval=100)
    assert isinstance(whole.manager, CheckpointManager)
    assert whole.manager.load() is False
    losses = whole.train(6)
    assert Run(corpus, tmp_path, interval=3).train(3) == losses[:3]
    resumed = Run(corpus, tmp_path, seed=1, interval=3)
    assert resumed.manager.load() and resumed.state.step == 3
    assert resumed.train(6) == losses[3:]
    assert_equal(resumed.everything(), whole.everything())
    assert steps(tmp_path) == [3, 6]


def test_the_folder_has_steps(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path, interval=2)
    run.train(2)
    assert [path.name for path in (tmp_path / "ckpt").glob("step-*")] == ["step-000000000002"]
    subprocess.run([FEEDLINE, "ckpt", "verify", str(tmp_path / "ckpt")], check=True)
    step = ckpt.open(tmp_path / "ckpt")
    groups = collections.defaultdict(list)
    for group, name in step.keys():
        groups[group].append(name)
    weights = list(run.model.state_dict())
    assert groups["model"] == weights
    assert sorted(groups["exp_avg"]) == sorted(groups["exp_avg_sq"]) == sorted(weights)
    assert sorted(groups["other"]) == sorted(
        [f"optimizer.state.{name}.step" for name in weights] + ["train_state.step"]
    )
    assert torch.equal(torch.from_numpy(step.read("head.weight")), run.model.head.weight.detach())


@pytest.mark.usefixtures("group")
def test_a_save_in_a_thread_has_the_state_at_the_call(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path, interval=2, async_mode="async", keep_latest_k=2)
    expected = {}
    for step in (2, 4, 6):
        run.train(step)
        assert run.manager.save_future is not None
        expected[step] = run.everything()
    run.train(7)
    run.manager.close()
    assert run.manager.save_future is None
    assert steps(tmp_path) == [4, 6]
    for step in (4, 6):
        again = Run(corpus, tmp_path, seed=1, load_only=True)
        assert again.manager.load(step)
        assert_equal(again.everything(), expected[step])


@pytest.mark.usefixtures("group")
def test_close_raises_the_error_of_a_thread(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path, interval=2, async_mode="async")
    run.train(2)
    run.manager.maybe_wait_for_saving()
    run.manager.save(2)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        run.manager.close()
    assert isinstance(raised(caught.value), feedline.StepExistsError)


def test_another_number_of_ranks_loads(
    corpus: str, tmp_path: Path, start: Callable[..., Any]
) -> None:
    # `load` then saves in another process.
    for verb, world in (("save", 2), ("load", 1)):
        store = tmp_path / f"{verb}.store"
        ranks = [
            start(torchtitan_run.__file__, corpus, tmp_path, verb, rank, world, store)
            for rank in range(world)
        ]
        for rank in ranks:
            rank.output()
    assert ckpt.verify(tmp_path / "ckpt", progress=False)["ok"]


def test_only_old_steps_are_deleted(corpus: str, tmp_path: Path) -> None:
    others = [tmp_path / "ckpt" / name for name in ("step-1", "step-9-notes", "notes")]
    for other in others:
        other.mkdir(parents=True)
    run = Run(corpus, tmp_path, interval=1, keep_latest_k=2)
    run.train(4)
    run.manager.close()
    assert steps(tmp_path) == [3, 4]
    assert all(other.is_dir() for other in others)
    Run(corpus, tmp_path / "all", interval=1, keep_latest_k=0).train(4)
    assert steps(tmp_path / "all") == [1, 2, 3, 4]


def test_a_step_may_be_chosen(corpus: str, tmp_path: Path) -> None:
    Run(corpus, tmp_path, interval=2).train(6)
    run = Run(corpus, tmp_path, seed=1, load_only=True)
    assert run.manager.load(4) and run.state.step == 4
    assert run.manager.save(5, last_step=True) is False
    with pytest.raises(FileNotFoundError, match="step-000000000005"):
        run.manager.load(5)
    # Later steps would conflict with new ones, and the next start would load them.
    run = Run(corpus, tmp_path, seed=1, interval=2)
    with pytest.raises(ValueError, match="expected no later step, found step 6"):
        run.manager.load(4)
    assert run.manager.load(6) and run.state.step == 6


def test_a_run_starts_from_another_run(corpus: str, tmp_path: Path) -> None:
    first = Run(corpus, tmp_path / "first", interval=2)
    first.train(4)
    folder = tmp_path / "first/ckpt"
    weights = first.model.state_dict()
    for path, whole in ((folder, False), (folder / "step-000000000004", True)):
        run = Run(
            corpus,
            tmp_path / f"second-{whole}",
            seed=1,
            interval=1,
            initial_load_path=str(path),
            initial_load_model_only=not whole,
        )
        assert run.manager.load()
        assert_equal(dict(run.model.state_dict()), dict(weights))
        assert run.state.step == (4 if whole else 0)
        run.train(run.state.step + 1)
        assert run.manager.load() and run.state.step == (5 if whole else 1)  # its own step
    run = Run(corpus, tmp_path / "third", initial_load_path=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="initial_load_path is invalid"):
        run.manager.load()


def test_excluded_states_are_not_loaded(corpus: str, tmp_path: Path) -> None:
    Run(corpus, tmp_path, interval=2).train(2)
    run = Run(corpus, tmp_path, seed=1, exclude_from_loading=["dataloader", "lr_scheduler"])
    assert run.manager.load() and run.state.step == 2
    assert run.dataloader.state_dict()["samples_consumed"] == 0


def test_the_last_step_may_be_weights(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path, interval=2, export_dtype="bfloat16")
    run.train(3, last=3)
    step = ckpt.open(tmp_path / "ckpt")
    assert step.step == 3
    assert {(group, step.entry(name, group)[0]) for group, name in step.keys()} == {
        ("model", "BF16")
    }


def test_a_run_of_torchtitans_own_manager_continues(corpus: str, tmp_path: Path) -> None:
    stock = Run(corpus, tmp_path, manager=checkpoint.CheckpointManager, interval=2, keep_latest_k=0)
    stock.train(4)
    run = Run(corpus, tmp_path, seed=1, interval=2, keep_latest_k=2)
    assert run.manager.load()
    assert_equal(run.everything(), stock.everything())
    run.train(10)
    run.manager.close()
    assert steps(tmp_path) == [8, 10]
    assert (tmp_path / "ckpt/step-4/.metadata").is_file()
    again = Run(corpus, tmp_path, seed=2)
    assert again.manager.load() and again.state.step == 10
    again = Run(corpus, tmp_path / "other", initial_load_path=str(tmp_path / "ckpt/step-2"))
    assert again.manager.load()


class Adapter:
    """A state dict adapter of torchtitan: other names for the same tensors."""

    fqn_to_index_mapping = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"transformer.{name}": tensor for name, tensor in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("transformer."): tensor for name, tensor in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool) -> Any:
        return dcp.HuggingFaceStorageReader(path)


def test_torchtitan_itself_reads_and_writes_hugging_face(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path, adapter=Adapter(), interval=2, last_save_in_hf=True)
    run.train(3, last=3)
    assert (tmp_path / "ckpt/step-3").is_dir()
    assert steps(tmp_path) == [2]
    subprocess.run([FEEDLINE, "ckpt", "verify", str(tmp_path / "ckpt")], check=True)
    tuned = Run(
        corpus,
        tmp_path / "tuned",
        seed=1,
        adapter=Adapter(),
        initial_load_in_hf=True,
        initial_load_path=str(tmp_path / "ckpt/step-3"),
    )
    assert tuned.manager.load()
    assert_equal(dict(tuned.model.state_dict()), dict(run.model.state_dict()))
    # A run does not continue from weights alone.
    again = Run(corpus, tmp_path, adapter=Adapter())
    assert again.manager.load() and again.state.step == 2


def test_values_that_cannot_be_saved_are_refused(corpus: str, tmp_path: Path) -> None:
    run = Run(corpus, tmp_path, interval=2)
    run.manager.states["odd"] = {"value": object}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        run.train(2)
    assert "cannot save 'odd.value'" in str(raised(caught.value))
    run = Run(corpus, tmp_path, interval=2, allow_pickle=True)
    run.manager.states["odd"] = {"value": torch.Generator}
    run.train(2)
    run.manager.states["odd"]["value"] = None
    assert run.manager.load()
    with pytest.raises(ValueError, match="step- and 12 digits"):
        run.manager.dcp_save({}, str(tmp_path / "step-2"), checkpoint.AsyncMode.DISABLED)
    with pytest.raises(ValueError, match="found scheme 'gs'"):
        Run(corpus, "gs://bucket/run")


def test_folders_may_be_in_a_bucket(corpus: str) -> None:
    manager = Run(corpus, "s3://bucket/run?endpoint=http://127.0.0.1:9&region=x").manager
    path, options = manager.folder.split("?")
    assert manager._create_checkpoint_id(7) == f"{path}/step-000000000007?{options}"


def test_a_manager_may_be_disabled(tmp_path: Path) -> None:
    manager = CheckpointManager.Config(enable=False).build(
        dataloader=None,
        model_parts=[],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    assert manager.load() is False and manager.save(1, last_step=True) is False
    manager.close()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_setting_is_refused(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(corpus, tmp_path, interval=2)
    with pytest.raises(ValueError, match="expected async_mode disabled.*found 'later'"):
        run.manager._saved({}, None, "later")
    # As if it were a field of a newer torchtitan: only its default is accepted.
    known = [name for name in feedline.torchtitan.CHECKPOINT_FIELDS if name != "export_dtype"]
    monkeypatch.setattr(feedline.torchtitan, "CHECKPOINT_FIELDS", known)
    assert Run(corpus, tmp_path, interval=2).manager.enable
    with pytest.raises(ValueError, match="cannot use export_dtype of CheckpointManager.Config"):
        Run(corpus, tmp_path, interval=2, export_dtype="bfloat16")


# Methods that Feedline replaces, and those that call them or that it calls.
METHODS = {
    "_close": [],
    "_create_checkpoint_id": ["step", "folder"],
    "_find_load_step": ["folder"],
    "_flattened_model_states_sd": ["state_dict"],
    "_load": ["step"],
    "_maybe_wait_for_staging": [],
    "_purge_stale_checkpoints": [],
    "_save": ["curr_step", "last_step"],
    "_save_last_step": ["curr_step"],
    "_should_purge": [],
    "_should_save": ["curr_step", "last_step"],
    "_states_to_load": ["model_only"],
    "_wait_for_saving": [],
    "close": [],
    "dcp_load": ["state_dict", "checkpoint_id", "from_hf", "from_quantized"],
    "dcp_save": [
        "state_dict",
        "checkpoint_id",
        "async_mode",
        "enable_garbage_collection",
        "to_hf",
    ],
    "load": ["step"],
    "maybe_wait_for_saving": [],
    "maybe_wait_for_staging": [],
    "save": ["curr_step", "last_step"],
}


def test_torchtitans_manager_has_the_names_that_are_known() -> None:
    manager = checkpoint.CheckpointManager
    modes = ["disabled", "async", "async_with_pinned_mem"]
    assert_known([mode.value for mode in checkpoint.AsyncMode], modes, "AsyncMode")
    fields = feedline.torchtitan.CHECKPOINT_FIELDS
    assert_known(fields_of(manager.Config), fields, "CheckpointManager.Config")
    methods = {name for name in dir(manager) if inspect.isfunction(getattr(manager, name))}
    methods = {name for name in methods if not name.startswith("__")}
    assert_known(methods, METHODS, "CheckpointManager")
    for name, parameters in METHODS.items():
        found = parameters_of(getattr(manager, name))
        assert found == ["self", *parameters], name
    parts = ["dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "sd_adapter"]
    known = ["self", "config", *parts, "base_folder"]
    assert_known(parameters_of(manager.__init__), known, "CheckpointManager()")
