"""Checkpoints of megatron-core, saved and loaded by its own ``dist_checkpointing``."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import io
import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.core
import megatron_ranks
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron_ranks import IN_BACKGROUND, load_and_compare, state_of
from protocols import assert_known
from torch.distributed.checkpoint.api import CheckpointException

import feedline.megatron
from feedline import _megatron_options as options
from feedline import ckpt
from feedline.dcp import StorageReader
from feedline.megatron import LoadStrategy, SaveStrategy

FEEDLINE = Path(sys.executable).with_name("feedline")
FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Megatron creates the folder before it saves."""
    (tmp_path / "iter_0000010").mkdir()
    return tmp_path / "iter_0000010"


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own save needs a GPU only for synchronization."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def save(folder: Path, change: float = 0, **options: Any) -> None:
    dist_checkpointing.save(state_of(0, 1, 0, change), str(folder), SaveStrategy(**options))


def assert_verified(folder: Path) -> None:
    command = [str(FEEDLINE), "ckpt", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_save_and_others_load(
    folder: Path, start: Callable[..., Any], ranks: int
) -> None:
    parent = folder.parent
    background = parent / "iter_0000020"
    background.mkdir()
    programs = [
        start(megatron_ranks.__file__, parent, rank, ranks, parent / "store")
        for rank in range(ranks)
    ]
    for program in programs:
        program.output()
    for each, iteration in ((folder, 10), (background, 20)):
        load_and_compare(str(each), 0, 1, 0)
        load_and_compare(str(each), 0, 1, 1)
        assert_verified(each)
        names = sorted(path.name for path in each.iterdir() if not path.name.startswith("."))
        assert names == ["common.pt", "latest", "metadata.json", f"step-{iteration:012}"]
        config = json.loads((each / "metadata.json").read_text())
        assert config["sharded_backend"] == "torch_dist"
        # The same files with each release, so that all load them.
        assert "common_state" not in " ".join(StorageReader(each).read_metadata().state_dict_metadata)
        common = torch.load(each / "common.pt", weights_only=True)
        assert common["iteration"] == 10 and common["names"] == ["a", ("b",)]


def test_a_checkpoint_opens_without_megatron(folder: Path) -> None:
    save(folder, meta={"run": 3})
    step = ckpt.open(folder)
    assert (step.step, step.meta) == (10, {"run": 3})
    assert {("model", "weight"), ("model", "layers.weight"), ("exp_avg", "weight")} <= set(
        step.keys()
    )
    assert step.entry("layers.weight") == ("BF16", [megatron_ranks.PARTS, 3, 4])
    assert (step.read("weight", "exp_avg") == megatron_ranks.WHOLE.numpy() * 2).all()


def test_objects_are_the_bytes_that_megatron_pickled(folder: Path) -> None:
    save(folder)
    values = json.loads(ckpt.open(folder).blob("dcp-values-00000.json"))
    reader = StorageReader(folder)
    reader._gives_raw_bytes = True  # as LoadStrategy does
    key = "rng_state/shard_1_4"
    pickled = reader._pickled(key)
    expected = io.BytesIO()
    torch.save([{"seed": 1, "of": ("x", 0)}], expected)
    assert list(values[key]) == ["$bytesio"] and pickled.getvalue() == expected.getvalue()


@pytest.mark.parametrize("is_first_megatrons", [False, True])
def test_saving_again_replaces_the_step(
    folder: Path, without_gpu: None, is_first_megatrons: bool
) -> None:
    if is_first_megatrons:
        dist_checkpointing.save(state_of(0, 1, 0), str(folder))
    else:
        save(folder)
    save(folder, 3)
    load_and_compare(str(folder), 0, 1, 1, 3)
    assert_verified(folder)


def test_a_save_that_fails_leaves_no_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder)
    with monkeypatch.context() as patch:
        patch.setattr(feedline.megatron.StorageWriter, "write_data", failing)
        with pytest.raises(CheckpointException, match="no disk"):
            save(folder, 3)
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    with pytest.raises(FileNotFoundError):
        LoadStrategy().load({}, folder)
    save(folder, 3)
    load_and_compare(str(folder), 0, 1, 0, 3)


def failing(*_: Any) -> None:
    raise OSError("no disk")


def test_checkpoints_of_megatron_load(folder: Path, without_gpu: None) -> None:
    dist_checkpointing.save(state_of(0, 1, 0, 2), str(folder))
    load_and_compare(str(folder), 0, 1, 1, 2)
    metadata = load_sharded_metadata(str(folder), LoadStrategy())
    assert metadata["weight"].global_shape == (8, 12)


def test_metadata_and_strict_loading(folder: Path) -> None:
    save(folder)
    metadata = load_sharded_metadata(str(folder), LoadStrategy())
    assert isinstance(metadata["rng_state/shard_0_4"], ShardedObject)
    assert metadata["layers.weight"].global_shape == (4, 3, 4)
    tensors = dist_checkpointing.load_tensors_metadata(str(folder), LoadStrategy())
    assert tensors["weight"].dtype == torch.float32 and "extra/shard_0_1" not in tensors
    unknown = {"w": ShardedTensor.from_rank_offsets("unknown", torch.ones(2))}
    _, missing, unexpected = dist_checkpointing.load(
        unknown, str(folder), LoadStrategy(), strict="return_all"
    )
    assert unexpected == {"unknown"} and "weight" in missing


def test_shapes_are_compared(folder: Path) -> None:
    save(folder)
    other = {"w": ShardedTensor.from_rank_offsets("weight", torch.zeros(9, 12))}
    with pytest.raises(CheckpointException, match="Global shape mismatch"):
        dist_checkpointing.load(other, str(folder), LoadStrategy())
    padded = {
        "w": ShardedTensor.from_rank_offsets(
            "weight", torch.ones(9, 12), allow_shape_mismatch=True
        )
    }
    found = dist_checkpointing.load(padded, str(folder), LoadStrategy())["w"]
    assert torch.equal(found[:8], megatron_ranks.WHOLE) and not found[8].any()


def test_the_wrapper_for_parallel_saves(folder: Path) -> None:
    strategy = FullyParallelSaveStrategyWrapper(SaveStrategy())
    dist_checkpointing.save(state_of(0, 1, 0), str(folder), strategy)
    load_and_compare(str(folder), 0, 1, 1)


def test_megatrons_queue_waits_for_a_background_save(
    folder: Path, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write_data = feedline.megatron.StorageWriter.write_data

    def slow(*args: Any) -> Any:
        assert may_write.wait(60)
        return write_data(*args)

    monkeypatch.setattr(feedline.megatron.StorageWriter, "write_data", slow)
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save(
        state_of(0, 1, 0), str(folder), SaveStrategy(), **IN_BACKGROUND
    )
    # Megatron's persistent process, which needs a GPU, receives this by a queue.
    pickle.dumps(request._replace(finalize_fns=[]))
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls() == []
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    may_write.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    load_and_compare(str(folder), 0, 1, 1)


def test_a_failed_background_save_is_raised_at_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedline.megatron.StorageWriter, "write_data", failing)
    request = dist_checkpointing.save(
        state_of(0, 1, 0), str(folder), SaveStrategy(), **IN_BACKGROUND
    )
    with pytest.raises(CheckpointException, match="no disk"):
        request.execute_sync()
    assert not dist_checkpointing.check_is_distributed_checkpoint(str(folder))


def test_saves_in_the_background_share_a_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron-LM makes a strategy for each save. A group has threads and connections until the end.
    groups = []
    new_group = dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        groups.append(new_group(*args, **options))
        return groups[-1]

    monkeypatch.setattr(dist, "new_group", counted)
    for change in range(2):
        state = state_of(0, 1, 0, change)
        dist_checkpointing.save(
            state, str(folder), SaveStrategy(), **IN_BACKGROUND
        ).execute_sync()
        load_and_compare(str(folder), 0, 1, 0, change)
    assert len(groups) == 1

    # The group ends with the default one.
    group = weakref.ref(groups.pop())
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist_checkpointing.save(
        state, str(folder), SaveStrategy(), **IN_BACKGROUND
    ).execute_sync()
    assert len(groups) == 1


def test_a_process_waits_for_the_lock_of_another() -> None:
    lock = feedline.megatron._ProcessLock()
    context = multiprocessing.get_context("fork")
    waiting = context.Process(target=feedline.megatron._wait_for, args=(lock.path,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    lock.release()
    waiting.join(60)
    assert waiting.exitcode == 0
    feedline.megatron._wait_for(lock.path)  # the file does not exist: nothing to wait for
    assert not os.path.exists(lock.path)


def test_a_checkpoint_with_hashes_of_megatron(folder: Path) -> None:
    if "verify_integrity" not in inspect.signature(dist_checkpointing.save).parameters:
        pytest.skip("megatron-core before 0.17.1 has no verify_integrity")
    dist_checkpointing.save(state_of(0, 1, 0), str(folder), SaveStrategy(), verify_integrity=True)
    load_and_compare(str(folder), 0, 1, 1, verify_integrity=True)


def test_arguments_of_strategies_are_named(folder: Path) -> None:
    with pytest.raises(TypeError, match="unknown_option"):
        SaveStrategy().async_save(state_of(0, 1, 0), folder, unknown_option=1)
    with pytest.raises(ValueError, match=r"found \['unknown_option'\]"):
        options.check_save_arguments(("torch_dist", 1), {"unknown_option": 1, "thread_count": 2})
    with pytest.raises(ValueError, match="expected the backend torch_dist 1"):
        options.check_save_arguments(("zarr", 1), {})


def test_a_release_without_common_files_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A checkpoint could be saved, but not loaded.
    for name in ("save_common", "get_default_save_common_strategy", "_legacy_common_state_exists"):
        monkeypatch.delattr(serialization, name, raising=False)
    release = f"found megatron-core {megatron.core.__version__}"
    with pytest.raises(ValueError, match=release):
        SaveStrategy().save({}, folder)


class Training:
    """The names that Megatron-LM's script of checkpoints had until 0.16."""

    get_default_save_sharded_strategy = strategies.TorchDistSaveShardedStrategy
    get_default_load_sharded_strategy = strategies.TorchDistLoadShardedStrategy


def test_install_in_megatron_lm_before_its_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = types.ModuleType("megatron.training")
    module: Any = types.ModuleType("megatron.training.checkpointing")
    monkeypatch.setitem(sys.modules, training.__name__, training)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    release = f"megatron-core {megatron.core.__version__}.*found neither"
    with pytest.raises(AttributeError, match=release):
        feedline.megatron.install()
    vars(module).update(vars(Training))
    feedline.megatron.install(meta="here")
    # As Megatron-LM calls them.
    save_strategy = module.get_default_save_sharded_strategy("torch_dist")
    assert_installed(folder, save_strategy, module.get_default_load_sharded_strategy(str(folder)))


def test_install_in_released_megatron_lm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        with pytest.raises(ModuleNotFoundError, match="checkpointing, found none"):
            feedline.megatron.install()
        return
    from megatron.training import checkpointing

    for name in ("TorchDistSaveShardedStrategy", "TorchDistLoadShardedStrategy"):
        monkeypatch.setattr(checkpointing, name, getattr(checkpointing, name))
    feedline.megatron.install(meta="here")
    save_strategy = checkpointing.TorchDistSaveShardedStrategy()
    load_strategy = checkpointing.TorchDistLoadShardedStrategy(cache_metadata=True)
    assert_installed(folder, save_strategy, load_strategy)


def assert_installed(folder: Path, save_strategy: Any, load_strategy: Any) -> None:
    save_strategy.use_cached_ckpt_structure = True
    dist_checkpointing.save(state_of(0, 1, 0), str(folder), save_strategy)
    assert ckpt.open(folder).meta == "here"
    assert isinstance(load_strategy, LoadStrategy)
    assert isinstance(save_strategy, strategies.TorchDistSaveShardedStrategy)


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("loss of iteration")]


def test_released_megatron_lm_resumes_after_a_kill(
    corpus: str, tmp_path: Path, start: Callable[..., Any]
) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron-core 0.16 has no megatron.training")
    program = FOLDER / "megatron_lm.py"
    background = ("--async-save", "--async-strategy", "mcore")
    plain = start(program, tmp_path / "plain", corpus, "--plain")
    # The builder's data until the kill in the fifth iteration, then those of an external loader.
    start(program, tmp_path, corpus, "--kill-at", 4, *background).killed()
    expected = losses(plain.output())
    latest = tmp_path / "ckpt/latest_checkpointed_iteration.txt"
    first = int(latest.read_text())
    external = ("--dataloader-type", "external")
    resumed = losses(start(program, tmp_path, corpus, *external, *background).output())
    assert len(expected) == 12 and 2 <= first <= 4
    assert resumed == expected[2 * first :]
    assert latest.read_text() == "6"
    assert_verified(tmp_path / "ckpt/iter_0000006")


def test_the_protocol_of_this_release_is_known() -> None:
    # Names of later releases than the oldest one; a release may lack them.
    added = {
        "async_strategy",
        "cache_metadata",
        "checkpoint_name",
        "cpu_shm_mode",
        "process_group",
        "stream_ckpt_dequant",
        "verify_integrity",
    }
    removed = {"common_strategy"}
    save_class = strategies.TorchDistSaveShardedStrategy
    load_class = strategies.TorchDistLoadShardedStrategy
    for function, names in (
        (save_class.__init__, ["self", *options.SAVE_ARGUMENTS]),
        (save_class.save, "self sharded_state_dict checkpoint_dir".split()),
        (save_class.async_save, "self sharded_state_dict checkpoint_dir async_strategy".split()),
        (load_class.__init__, "self cache_metadata stream_ckpt_dequant checkpoint_name".split()),
        (load_class.load, "self sharded_state_dict checkpoint_dir async_strategy".split()),
        (load_class.load_tensors_metadata, "self checkpoint_dir metadata".split()),
        (load_class.load_sharded_metadata, "self checkpoint_dir".split()),
        (dist_checkpointing.save, SAVE.split()),
        (dist_checkpointing.load, LOAD.split()),
        (strategies.MCoreLoadPlanner.__init__, PLANNER.split()),
    ):
        found = set(inspect.signature(function).parameters)
        missing = (added | removed) & (set(names) - found)
        assert_known(found | missing, names, function.__qualname__)
    assert_known(AsyncRequest._fields, REQUEST.split(), "AsyncRequest")


SAVE = """
    sharded_state_dict checkpoint_dir sharded_strategy common_strategy validate_access_integrity
    async_sharded_save preprocess_common_before_consistancy_check content_metadata async_strategy
    verify_integrity
"""
LOAD = """
    sharded_state_dict checkpoint_dir sharded_strategy common_strategy validate_access_integrity
    strict verify_integrity process_group
"""
PLANNER = """
    self args shapes_validation_sharded_tensors allow_shape_mismatch_sharded_tensors
    stream_ckpt_dequant kwargs
"""
REQUEST = "async_fn async_fn_args finalize_fns async_fn_kwargs preload_fn is_frozen call_idx"


def test_what_megatron_lm_sets_in_a_strategy_is_known() -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron-core 0.16 has no megatron.training")
    from megatron.training import checkpointing

    source = inspect.getsource(checkpointing)
    found = set(re.findall(r"\bsave_strategy\.(\w+) =", source))
    for call in re.findall(r"TorchDist(?:Save|Load)ShardedStrategy\(([^()]*)", source):
        found |= set(re.findall(r"(\w+)=", call))
    later = {"cpu_shm_mode", "stream_ckpt_dequant"}
    known = {"use_cached_ckpt_structure", "thread_count", "cached_global_metadata"}
    assert_known(found | later, {"cache_metadata", *known, *later}, "strategies of Megatron-LM")
