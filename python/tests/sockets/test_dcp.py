"""torch.distributed.checkpoint in one process; `test_dcp_ranks` has several."""

from __future__ import annotations

import collections
import copy
import datetime
import io
import json
import math
import multiprocessing
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.remote_device import _remote_device

import feedline
from feedline import _staging, ckpt
from feedline.dcp import StorageReader, StorageWriter, release_staging

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


FEEDLINE = Path(sys.executable).with_name("feedline")


def a_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {
            "layers.0.weight": torch.randn(33, 17),
            "layers.0.bias": torch.randn(17).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
        },
        "optim": {
            "state": {
                "layers.0.weight": {
                    "step": torch.tensor(7.0),
                    "exp_avg": torch.randn(33, 17),
                    "exp_avg_sq": torch.rand(33, 17),
                }
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["layers.0.weight"]}],
        },
        "rng": torch.get_rng_state(),
        "progress": {"step": 7, "tokens": 2**40, "note": "ä", "loss": float("inf"), "none": None},
    }


def zeros_like(state: Any) -> Any:
    """The state without its contents."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeros_like(value) for value in state]
    return None


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def save(state: dict[str, Any], folder: Path, step: int, **options: Any) -> None:
    dcp.save(state, storage_writer=StorageWriter(folder, step, **options))


def raised(failure: dcp.api.CheckpointException) -> BaseException:
    """The exception of a rank, from that of DCP."""
    ((exception, _),) = failure.failures.values()
    return exception


def wait_for_drains() -> None:
    for thread in threading.enumerate():
        if thread.name == "feedline-drain":
            thread.join(60)


def test_a_state_is_loaded_as_saved(tmp_path: Path) -> None:
    state = a_state()
    save(state, tmp_path, 7, meta={"run": "a"})
    found = zeros_like(state)
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert_equal(found, state)
    assert ckpt.open(tmp_path).meta == {"run": "a"}


@pytest.mark.parametrize("elements", [8, 200_000], ids=["small", "large"])
def test_lazy_conjugates_and_signs_are_resolved(tmp_path: Path, elements: int) -> None:
    numbers = torch.randn(elements, dtype=torch.complex64)
    # torch only sets a flag; both share the memory of `numbers`.
    state = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    assert state["conjugate"].is_conj() and state["negative"].is_neg()
    staged = StorageWriter(tmp_path, 1).stage(state)
    for step, each in enumerate((state, staged)):
        save(each, tmp_path, step)
        found = {name: torch.zeros_like(value) for name, value in staged.items()}
        dcp.load(found, storage_reader=StorageReader(tmp_path, step))
        for name, value in state.items():
            assert torch.equal(found[name], value), name


def test_a_state_is_loaded_without_a_template(tmp_path: Path) -> None:
    state = a_state()
    save(state, tmp_path, 7)
    found = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "step-000000000007"))
    assert_equal(found["model"], state["model"])
    assert_equal(found["optim"], state["optim"])


def test_tensors_are_in_the_groups_of_the_format(tmp_path: Path) -> None:
    save(a_state(), tmp_path, 7)
    step = ckpt.open(tmp_path)
    groups = collections.defaultdict(list)
    for group, name in step.keys():
        groups[group].append(name)
    assert groups == {
        "model": ["layers.0.weight", "layers.0.bias", "empty", "scalar"],
        "exp_avg": ["layers.0.weight"],
        "exp_avg_sq": ["layers.0.weight"],
        "other": ["optim.state.layers.0.weight.step", "rng"],
    }
    # Other programs find only the weights.
    index = json.loads((tmp_path / "step-000000000007/model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(groups["model"])


def test_steps_of_other_programs_are_read(tmp_path: Path) -> None:
    weights = {"wte.weight": torch.randn(8, 4), "ln.bias": torch.randn(4).half()}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    arguments = [tmp_path / "model.safetensors", tmp_path / "ckpt", "--from", "hf", "--step", "3"]
    subprocess.run([FEEDLINE, "ckpt", "import", *arguments], check=True, capture_output=True)
    found = {"model": zeros_like(weights)}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert_equal(found["model"], weights)


def test_a_flat_state_is_a_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    save(model.state_dict(), tmp_path, 1)
    assert {group for group, _ in ckpt.open(tmp_path).keys()} == {"model"}
    (file,) = (tmp_path / "step-000000000001").glob("model-*.safetensors")
    for name, tensor in safetensors.torch.load_file(file).items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_names_of_torchtitan_and_megatron_are_known(tmp_path: Path) -> None:
    state = {
        "model.layers.0.weight": torch.randn(2, 2),  # a Llama's own name
        "optimizer": {"state.model.layers.0.weight.exp_avg": torch.randn(2, 2)},
        "optimizer.state.exp_avg_sq.model.layers.0.weight": torch.randn(2, 2),
        "optimizer.state.fp32_param.model.layers.0.weight": torch.randn(2, 2),
    }
    save(state, tmp_path, 1)
    groups = ["exp_avg", "exp_avg_sq", "master", "model"]
    name = "model.layers.0.weight"
    assert sorted(ckpt.open(tmp_path).keys()) == [(group, name) for group in groups]
    found = zeros_like(state)
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert_equal(found, state)


def test_values_are_json_and_keep_their_types(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    state = {
        "values": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "bytes": b"\x00\xff",
            "set": {1, 2},
            "in a tuple": ({1: "a", (2, "x"): None}, [[]]),
            "ordered": collections.OrderedDict(b=1, a=2),
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "complex": 1 - 2j,
            "big": 1 << 100,
            "numbers": [0.1, float("-inf"), True, np.float32(0.25), np.int64(-3)],
            "$odd": "$",
        }
    }
    save(state, tmp_path, 1)
    found = zeros_like(state)
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    expected, found = state["values"], found["values"]
    generator, keys, *rest = expected.pop("numpy")
    assert found["numpy"][0] == generator and (found["numpy"][1] == keys).all()
    assert list(found.pop("numpy")[2:]) == rest
    assert found == expected
    assert [type(value) for value in found["numbers"]] == [
        float, float, bool, np.float32, np.int64,
    ]
    random.setstate(found["python"])
    stored = tmp_path / "step-000000000001/extra/dcp-values-00000.json"
    assert b"pickle" not in stored.read_bytes()


def test_values_that_json_cannot_store_are_refused_by_name(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "when": datetime.date(2026, 1, 2)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(state, tmp_path, 1)
    error = raised(caught.value)
    assert isinstance(error, ValueError)
    assert "cannot save 'when'" in str(error) and "datetime.date" in str(error)
    assert ckpt.ls(tmp_path)["steps"] == [] if list(tmp_path.iterdir()) else True

    save(state, tmp_path, 1, allow_pickle=True)
    found: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "when": None}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert "allow_pickle=True" in str(raised(caught.value))
    dcp.load(found, storage_reader=StorageReader(tmp_path, allow_pickle=True))
    assert found["when"] == state["when"]


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("complex", torch.zeros(2, dtype=torch.complex128), "found torch.complex128"),
        ("piece#1", torch.zeros(2), "'#' in a name is reserved"),
        ("__pad__x", torch.zeros(2), "reserved for padding"),
    ],
)
def test_tensors_that_cannot_be_stored_are_refused_by_name(
    tmp_path: Path, name: str, tensor: torch.Tensor, text: str
) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({name: tensor}, tmp_path, 1)
    error = raised(caught.value)
    assert isinstance(error, ValueError) and name in str(error) and text in str(error)


def test_targets_of_any_kind_are_filled(tmp_path: Path) -> None:
    weight = torch.randn(40, 30)
    save({"model": {"weight": weight, "ids": torch.arange(12)}}, tmp_path, 1)
    found = {"model": {"weight": torch.zeros(30, 40).t(), "ids": torch.zeros(12)}}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert torch.equal(found["model"]["weight"], weight)
    assert found["model"]["weight"].stride() == (1, 40)
    assert torch.equal(found["model"]["ids"], torch.arange(12).float())
    parameter = {"model": {"weight": torch.nn.Parameter(torch.zeros(40, 30))}}
    dcp.load(parameter, storage_reader=StorageReader(tmp_path))
    assert torch.equal(parameter["model"]["weight"], weight)


def test_other_dtypes_are_loaded_as_saved(tmp_path: Path) -> None:
    kinds = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16]
    kinds += [torch.uint32, torch.int32, torch.uint64, torch.int64]
    kinds += [torch.float8_e4m3fn, torch.float8_e5m2]
    bits = torch.randint(0, 2, (64,), dtype=torch.uint8)
    state = {str(kind): bits.view(kind).clone() for kind in kinds}
    save(state, tmp_path, 1)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    for name, tensor in state.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_missing_tensor_and_another_shape_are_errors_of_dcp(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path, 1)
    for wrong, text in (({"v": torch.ones(2)}, "model.v"), ({"w": torch.ones(3)}, "model.w")):
        with pytest.raises(dcp.api.CheckpointException, match=text):
            dcp.load({"model": wrong}, storage_reader=StorageReader(tmp_path))


def test_a_step_is_not_overwritten(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path, 1)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({"w": torch.zeros(2)}, tmp_path, 1)
    error = raised(caught.value)
    assert isinstance(error, feedline.StepExistsError) and isinstance(error, FileExistsError)
    found = {"w": torch.zeros(2)}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert found["w"].sum() == 2


def test_keep_last_deletes_old_steps(tmp_path: Path) -> None:
    for step in range(4):
        save({"w": torch.ones(2)}, tmp_path, step, keep_last=2)
    assert [line["step"] for line in ckpt.ls(tmp_path)["steps"]] == [2, 3]


def test_a_save_after_a_rollback_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Retention is by number: with one step to keep, it would delete the step that was just saved.
    for step in (100, 200):
        save({"w": torch.ones(2)}, tmp_path, step)
    with caplog.at_level("WARNING"):
        save({"w": torch.ones(2)}, tmp_path, 150, keep_last=1)
    assert "expected step 150 as the newest one, found step 200" in caplog.text
    assert [line["step"] for line in ckpt.ls(tmp_path)["steps"]] == [100, 150, 200]
    save({"w": torch.ones(2)}, tmp_path, 250, keep_last=1)
    assert [line["step"] for line in ckpt.ls(tmp_path)["steps"]] == [250]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": -1}, "cannot use step: expected a number from 0 to 999999999999, found -1"),
        ({"step": 10**12}, "found 1000000000000"),
        ({"timeout": 0}, "cannot use timeout: expected a finite number above 0, found 0.0"),
        ({"timeout": math.inf}, "found inf"),
        ({"timeout": math.nan}, "found nan"),
        ({"keep_last": 0}, "cannot use keep_last: expected at least 1, or None, found 0"),
        ({"shard_bytes_max": 0}, "cannot use shard_bytes_max: expected at least 1, found 0"),
        ({"meta": {"a": [1, {"b": 2**64}]}}, "cannot save meta['a'][1]['b']: expected an integer"),
        ({"meta": -(2**63) - 1}, "cannot save meta: .* found -9223372036854775809"),
    ],
)
def test_invalid_arguments_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    pattern = text if ".*" in text else re.escape(text)
    with pytest.raises(ValueError, match=pattern):
        StorageWriter(tmp_path, **{"step": 1, **options})


def test_the_largest_integers_are_loaded_as_saved(tmp_path: Path) -> None:
    meta = {"numbers": [2**64 - 1, -(2**63), 2**53 + 1], "flag": True}
    save({"w": torch.ones(2)}, tmp_path, 10**12 - 1, meta=meta)
    assert ckpt.open(tmp_path).meta == meta


def test_a_checkpoint_id_is_that_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ckpt"
    name = "step-000000000007"
    others = ["ckpt/step-000000000008", f"other/{name}", "other", name, "7", folder.parent]
    for wrong in others:
        with pytest.raises(ValueError, match=f"cannot save ckpt/{name}: expected this step"):
            StorageWriter("ckpt", 7).reset(wrong)
    for own in (None, f"ckpt/{name}", f"./ckpt/{name}/", folder / name, folder, "ckpt/"):
        writer = StorageWriter("ckpt", 7)
        writer.reset(own)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder / name, storage_writer=writer)
    with pytest.raises(ValueError, match="cannot save"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="8", storage_writer=StorageWriter("ckpt", 8))
    assert [line["step"] for line in ckpt.ls(folder)["steps"]] == [7]

    for text in (f"file://{folder}", f"file://{folder}?direct=off", "ckpt", f"{folder}/"):
        writer = StorageWriter(text, 7)
        writer.reset(writer.checkpoint_id)
        writer.reset(f"{folder}/{name}")
    writer = StorageWriter("s3://bucket/run/?endpoint=http://127.0.0.1:9", 7)
    assert writer.checkpoint_id == f"s3://bucket/run/{name}?endpoint=http://127.0.0.1:9"
    writer.reset(writer.checkpoint_id)
    writer.reset(f"s3://bucket/run/{name}")
    for wrong in (f"s3://other/run/{name}", f"s3://bucket/run/{name}?endpoint=http://other"):
        with pytest.raises(ValueError, match="leave checkpoint_id out"):
            writer.reset(wrong)


def test_a_checkpoint_id_may_name_the_step_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save({"w": torch.full((2,), float(step))}, tmp_path / "ckpt", step)
    first, second = "ckpt/step-000000000001", tmp_path / "ckpt/step-000000000002"

    def loaded(reader: StorageReader, checkpoint_id: Any) -> float:
        found = {"w": torch.zeros(2)}
        dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
        return found["w"][0].item()

    newest = StorageReader("ckpt")
    names = (None, tmp_path / "ckpt", first, second)
    assert [loaded(newest, each) for each in names] == [2, 2, 1, 2]
    for fixed in (StorageReader("ckpt", 1), StorageReader(first)):
        own = (None, first, tmp_path / first, "./ckpt/", fixed.checkpoint_id)
        assert [loaded(fixed, each) for each in own] == [1] * len(own)
        with pytest.raises(ValueError, match=f"{first}: expected this step"):
            loaded(fixed, second)
    for wrong in ("other", "other/step-000000000002", "2"):
        with pytest.raises(ValueError, match="leave checkpoint_id out"):
            loaded(newest, wrong)
    with pytest.raises(FileNotFoundError):
        loaded(newest, "ckpt/step-000000000003")
    assert loaded(newest, None) == 2


def test_steps_are_copied_to_a_second_folder(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for step in range(3):
        save(a_state(step), near, step, keep_last=1, drain_to=far)
    wait_for_drains()
    assert [line["step"] for line in ckpt.ls(far)["steps"]] == [0, 1, 2]
    assert ckpt.verify(far)["ok"] and ckpt.diff(near, far)["same"]
    assert ckpt.retain(near, 1, drain_to=far) in ([], [1], [0, 1])
    assert [line["step"] for line in ckpt.ls(near)["steps"]] == [2]

    save(a_state(), near, 3)
    (file,) = (near / "step-000000000003").glob("other-*")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(feedline.CorruptError, match="not copied to .*: 3"):
        ckpt.drain(near, far, progress=False)


def test_the_process_of_a_save_copies_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process that DCP starts is daemonic: the program kills it, with its threads, at exit.
    drain, threads = ckpt.drain, []

    def recorded(*arguments: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread())
        return drain(*arguments, **options)

    monkeypatch.setattr(ckpt, "drain", recorded)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    for step in range(2):
        save({"w": torch.ones(2)}, tmp_path / "near", step, drain_to=tmp_path / "far")
    assert threads == [threading.current_thread()] * 2
    assert [line["step"] for line in ckpt.ls(tmp_path / "far")["steps"]] == [0, 1]


def test_an_interrupted_copy_does_not_prevent_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(*_: Any, **__: Any) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, caplog.at_level("ERROR"):
        patch.setattr(ckpt, "drain", interrupted)
        save({"w": torch.ones(2)}, tmp_path / "near", 0, drain_to=tmp_path / "far")
        wait_for_drains()
    assert "KeyboardInterrupt()" in caplog.text
    save({"w": torch.ones(2)}, tmp_path / "near", 1, drain_to=tmp_path / "far")
    wait_for_drains()
    assert [line["step"] for line in ckpt.ls(tmp_path / "far")["steps"]] == [0, 1]


def test_without_threads_a_step_is_copied_by_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    save({"w": torch.ones(2)}, tmp_path / "near", 0, drain_to=tmp_path / "far")
    assert [line["step"] for line in ckpt.ls(tmp_path / "far")["steps"]] == [0]


def test_a_missing_step_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        StorageReader(tmp_path)
    save({"w": torch.ones(2)}, tmp_path, 5)
    with pytest.raises(FileNotFoundError, match="5"):
        StorageReader(tmp_path, 6)


def test_corruption_is_reported_with_its_file(tmp_path: Path) -> None:
    save({"w": torch.arange(1000), "v": torch.ones(3)}, tmp_path, 1)
    (file,) = (tmp_path / "step-000000000001").glob("model-*.safetensors")
    bytes = bytearray(file.read_bytes())
    bytes[4096 + 4000] ^= 1
    file.write_bytes(bytes)
    assert ckpt.verify(tmp_path)["ok"] is False
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"w": torch.zeros(1000)}, storage_reader=StorageReader(tmp_path))
    error = raised(caught.value)
    assert isinstance(error, feedline.CorruptError) and file.name in str(error)
    found = {"v": torch.zeros(3)}
    dcp.load(found, storage_reader=StorageReader(tmp_path))  # other blocks
    assert found["v"].sum() == 3


def test_a_cached_plan_saves_current_values(tmp_path: Path) -> None:
    state = a_state()
    for step in range(3):
        state["model"]["scalar"] += 1
        state["progress"]["step"] = step
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=StorageWriter(tmp_path, step), planner=planner)
        found = zeros_like(state)
        dcp.load(found, storage_reader=StorageReader(tmp_path, step))
        assert_equal(found, state)


def save_caching(state: dict[str, Any], folder: Path, step: int) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=StorageWriter(folder, step), planner=planner)


def test_a_save_after_one_that_could_not_be_planned(tmp_path: Path) -> None:
    # DCP caches plans per process, by the name of the planner's class. After a failure, torch 2.11
    # has cached the failed plan in each rank, and torch 2.15 only in the coordinator.
    state = {"model": {"w": torch.ones(2)}}
    save_caching(state, tmp_path, 1)
    for name in ("first", "second"):
        bad = {"model": {"w": torch.ones(2), name: torch.ones(2, dtype=torch.complex128)}}
        for _ in range(2):
            with pytest.raises(dcp.api.CheckpointException) as caught:
                save_caching(bad, tmp_path, 2)
            assert "complex128" in str(raised(caught.value))
    state["model"]["w"] += 1
    for step in (2, 3):
        save_caching(state, tmp_path, step)
        found = {"model": {"w": torch.zeros(2)}}
        dcp.load(found, storage_reader=StorageReader(tmp_path, step))
        assert found["model"]["w"].sum() == 4
    assert [line["step"] for line in ckpt.ls(tmp_path)["steps"]] == [1, 2, 3]


def test_a_save_after_one_of_another_storage(tmp_path: Path) -> None:
    # Its plans are in the same caches.
    state = {"model": {"w": torch.ones(2)}}
    for step in range(3):
        other = {"model": {**state["model"], f"v{step}": torch.ones(3)}}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(other, checkpoint_id=tmp_path / f"other-{step}", planner=planner)
        saved = [other, state] if step else [state, other]
        for number, each in enumerate(saved):
            save_caching(each, tmp_path / "own", 10 * step + number)
            names = [name for _, name in ckpt.open(tmp_path / "own", 10 * step + number).keys()]
            assert names == list(each["model"])


def test_a_changed_type_with_a_cached_plan_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2, dtype=torch.bfloat16)}
    save_caching(state, tmp_path, 1)
    state["w"] = state["w"].half()
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save_caching(state, tmp_path, 2)
    text = str(raised(caught.value))
    assert "expected torch.bfloat16 [2] as planned, found torch.float16" in text


class Executes:
    """Its pickle writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def test_stored_bytes_are_not_unpickled(tmp_path: Path) -> None:
    stored = io.BytesIO()
    torch.save(Executes(tmp_path / "executed"), stored)
    save({"bytes": stored}, tmp_path, 1)
    found: dict[str, Any] = {"bytes": None}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert found["bytes"].getvalue() == stored.getvalue()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", [np.zeros(2, [("a", "i4"), ("b", "f4")]), np.str_(""), {1, None}])
def test_a_value_is_loaded_as_saved_or_refused(tmp_path: Path, value: Any) -> None:
    try:
        save({"value": value}, tmp_path, 1)
    except dcp.api.CheckpointException as error:
        assert "cannot save 'value'" in str(raised(error))
        return
    found: dict[str, Any] = {"value": None}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert type(found["value"]) is type(value) and found["value"] == value


def test_failed_retention_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save({"w": torch.ones(2)}, tmp_path, 1)
    writer = StorageWriter(tmp_path, 2, keep_last=1, drain_to="nowhere://")
    with caplog.at_level("WARNING"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert "old steps are not deleted" in caplog.text
    assert [line["step"] for line in ckpt.ls(tmp_path)["steps"]] == [1, 2]


def test_an_optimizer_waits_for_all_copies(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    calls: list[int] = []
    staged = []
    for step in range(2):
        writer = StorageWriter(tmp_path, step, optimizer=optimizer)
        staged.append(writer.stage({"w": weight}))
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert len(calls) == 4 and weight.sum() == -(1 << 20)
    assert all((copied["w"] == 1).all() for copied in staged)


def test_a_background_save_has_the_state_at_the_call(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        state = a_state()
        tied = state["model"]["layers.0.weight"]
        state["model"]["head"] = tied
        before = zeros_like(state)
        for step in range(3):
            tied += 1
            expected = tied.clone()
            future = dcp.async_save(state, storage_writer=StorageWriter(tmp_path, step))
            tied += 1
            state["progress"]["step"] = 100 + step
            future.result()
            dcp.load(before, storage_reader=StorageReader(tmp_path, step))
            assert torch.equal(before["model"]["head"], expected)
            assert torch.equal(before["optim"]["state"]["layers.0.weight"]["exp_avg"],
                               state["optim"]["state"]["layers.0.weight"]["exp_avg"])
            assert before["progress"]["step"] == (7 if step == 0 else 99 + step)
    finally:
        torch.distributed.destroy_process_group()


def test_a_copy_may_wait_for_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process that DCP starts connects to this one by TCP.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def train() -> None:
            model(torch.randn(8, 600)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        train()
        for step, kind in enumerate(AsyncCheckpointerType):
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            expected = copy.deepcopy(state)
            future = dcp.async_save(
                state,
                storage_writer=StorageWriter(tmp_path, step, optimizer=optimizer),
                async_checkpointer_type=kind,
            )
            train()  # the running means of the batch norm change before the optimizer's step
            train()
            future.result()
            assert not torch.equal(expected["model"]["0.weight"], model.state_dict()["0.weight"])
            found = zeros_like(expected)
            dcp.load(found, storage_reader=StorageReader(tmp_path, step))
            assert_equal(found["model"], dict(expected["model"]))
            assert_equal(found["optim"], expected["optim"])
    finally:
        torch.distributed.destroy_process_group()


def test_copies_of_shards_are_on_the_host(tmp_path: Path) -> None:
    # torch refuses a shard whose memory is not where its metadata place it.
    shards = [ShardMetadata([4 * n, 0], [4, 2], f"rank:{n}/cuda:{n}") for n in range(2)]
    properties = TensorProperties(torch.bfloat16, requires_grad=True)
    metadata = ShardedTensorMetadata(shards, torch.Size([8, 2]), properties)
    before = copy.deepcopy(metadata)
    found = _staging._metadata_on_host(metadata, is_pinned=True)
    assert [str(shard.placement) for shard in found.shards_metadata] == ["rank:0/cpu", "rank:1/cpu"]
    assert [shard.shard_offsets for shard in found.shards_metadata] == [[0, 0], [4, 0]]
    expected = TensorProperties(torch.bfloat16, requires_grad=False, pin_memory=True)
    assert found.tensor_properties == expected and found.size == metadata.size
    assert metadata == before

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        local = torch.ones(8, 2, requires_grad=True)
        shard = sharded_tensor.Shard.from_tensor_and_offsets(local, [0, 0], 0)
        tensor = sharded_tensor.init_from_local_shards([shard], 8, 2)
        for each in (*tensor.metadata().shards_metadata, shard.metadata):
            each.placement = _remote_device("rank:0/cuda:0")
        staged = StorageWriter(tmp_path, 1).stage({"w": tensor})["w"]
        assert staged.local_tensor().sum() == 16 and not staged.local_tensor().requires_grad
    finally:
        torch.distributed.destroy_process_group()


def test_memory_of_copies_is_reused(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1 << 20)}
    writer = StorageWriter(tmp_path, 1)
    places = []
    for _ in range(3):
        staged = writer.stage(state)
        places.append(staged["w"].data_ptr())
        view = staged["w"][10:]
        del staged
        assert view.sum() == 0
        del view
    assert len(set(places)) == 1
    release_staging()


def test_the_command_reads_what_python_saved(tmp_path: Path) -> None:
    save(a_state(), tmp_path, 7)
    save(a_state(1), tmp_path, 8)
    for verb in ("ls", "verify", "inspect"):
        subprocess.run([FEEDLINE, "ckpt", verb, str(tmp_path)], check=True, capture_output=True)
    differs = ckpt.diff(tmp_path / "step-000000000007", tmp_path)
    assert not differs["same"] and differs["tensors_equal"] > 0
    assert ckpt.diff(tmp_path, tmp_path)["same"]
