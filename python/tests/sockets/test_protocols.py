"""The protocols of DCP in the installed torch: those for which `feedline.dcp` was written."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from protocols import assert_known
from torch.distributed.checkpoint import metadata, planner, staging, storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.utils import find_tensor_shard

from feedline import _plans, _staging
from feedline.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HAS_PUBLIC = hasattr(dcp, "CheckpointableTensor")
"""Whether tensors may have attributes with their place in a larger one, as in torch 2.15."""

FIELDS: dict[type, str] = {
    planner.SavePlan: "items storage_data planner_data usable",
    planner.LoadPlan: "items storage_data planner_data",
    planner.WriteItem: "index type bytes_io_data tensor_data",
    planner.ReadItem: "type dest_index dest_offsets storage_index storage_offsets lengths",
    planner.TensorWriteData: "chunk properties size",
    metadata.ChunkStorageMetadata: "offsets sizes",
    metadata.TensorProperties: "dtype layout requires_grad memory_format pin_memory"
    + " strides" * HAS_PUBLIC,
    metadata.MetadataIndex: "fqn offset index",
    metadata.Metadata: "state_dict_metadata planner_data storage_data storage_meta version",
    metadata.TensorStorageMetadata: "properties size chunks",
    metadata.BytesStorageMetadata: "",
    metadata.StorageMeta: "checkpoint_id save_id load_id modules",
    storage.WriteResult: "index size_in_bytes storage_data",
}

MEMBERS: dict[type[enum.Enum], str] = {
    planner.WriteItemType: "TENSOR SHARD BYTE_IO",
    planner.LoadItemType: "TENSOR BYTE_IO",
    AsyncCheckpointerType: "THREAD PROCESS",
}

METHODS: dict[type, str] = {
    storage.StorageWriter: "reset set_up_storage_writer prepare_local_plan prepare_global_plan "
    "write_data finish validate_checkpoint_id storage_meta",
    storage.StorageReader: "reset read_metadata set_up_storage_reader prepare_local_plan "
    "prepare_global_plan read_data validate_checkpoint_id",
    staging.AsyncStager: "stage synchronize_staging close should_synchronize_after_execute",
    planner.SavePlanner: "set_up_planner create_local_plan create_global_plan finish_plan "
    "resolve_data",
    planner.LoadPlanner: "set_up_planner create_local_plan create_global_plan finish_plan "
    "load_bytes resolve_bytes resolve_tensor commit_tensor",
}

PARAMETERS: dict[Callable[..., Any], str] = {
    dcp.save: "state_dict checkpoint_id storage_writer planner process_group no_dist "
    "use_collectives",
    dcp.async_save: "state_dict checkpoint_id storage_writer planner process_group "
    "async_checkpointer_type async_stager no_dist use_collectives",
    dcp.load: "state_dict checkpoint_id storage_reader planner process_group no_dist",
    _load_state_dict_from_keys: "keys checkpoint_id storage_reader process_group",
    _create_write_items: "fqn object",
    find_tensor_shard: "tensor index",
    storage.StorageWriter.set_up_storage_writer: "self is_coordinator args kwargs",
    storage.StorageWriter.finish: "self metadata results",
    storage.StorageReader.set_up_storage_reader: "self metadata is_coordinator args kwargs",
    storage.StorageReader.read_metadata: "self args kwargs",
    DefaultSavePlanner.__init__: "self flatten_state_dict flatten_sharded_tensors "
    "dedup_replicated_tensors dedup_save_to_lowest_rank enable_plan_caching",
    DefaultLoadPlanner.__init__: "self flatten_state_dict flatten_sharded_tensors "
    "allow_partial_load",
}


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_the_protocols_are_those_that_are_known() -> None:
    for kind, known in FIELDS.items():
        assert_known(fields_of(kind), known.split(), kind.__name__)
    for members, known in MEMBERS.items():
        assert_known([member.name for member in members], known.split(), members.__name__)
    for kind, known in METHODS.items():
        names = [name for name in vars(kind) if not name.startswith("_")]
        assert_known(names, known.split(), kind.__name__)
    for call, known in PARAMETERS.items():
        assert_known(inspect.signature(call).parameters, known.split(), call.__qualname__)


def test_the_caches_of_plans_are_those_that_are_known() -> None:
    found = [name for name in vars(planner.SavePlanner) if name.startswith("_cached")]
    assert_known(found, _plans._CACHES, "SavePlanner")
    # What a plan may contain without being refused.
    for name, known in _plans._FIELDS.items():
        kind = getattr(planner, name, None) or getattr(metadata, name)
        assert_known(fields_of(kind), known, name)
    types = [*planner.WriteItemType, *planner.LoadItemType]
    assert_known(map(str, types), map(str, _plans._TYPES), "the types of items")


def test_what_is_new_is_named() -> None:
    for found, text in (("a b c", r"new \['c'\], gone \[\]"), ("a", r"new \[\], gone \['b'\]")):
        with pytest.raises(AssertionError, match=f"thing: {text}"):
            assert_known(found.split(), ("a", "b"), "thing")


class Kind(enum.Enum):
    """A type of items that no release has."""

    DIFFERENCE = 9


@dataclasses.dataclass
class Chunk(metadata.ChunkStorageMetadata):
    """A chunk of a later release, which may be compressed."""

    codec: str = "none"


def with_chunk(item: Any, codec: str) -> Any:
    data = item.tensor_data
    chunk = Chunk(data.chunk.offsets, data.chunk.sizes, codec)
    return dataclasses.replace(item, tensor_data=dataclasses.replace(data, chunk=chunk))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda item: dataclasses.replace(item, type=Kind.DIFFERENCE), "found Kind.DIFFERENCE"),
        (lambda item: with_chunk(item, "zip"), "a Chunk of DCP without codec, found 'zip'"),
    ],
)
@pytest.mark.parametrize("is_finished", [False, True])
def test_an_unknown_item_is_not_saved(
    tmp_path: Path, change: Callable[[Any], Any], text: str, is_finished: bool
) -> None:
    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            return plan if is_finished else self.changed(plan)

        def finish_plan(self, plan: Any) -> Any:
            return self.changed(super().finish_plan(plan)) if is_finished else plan

        def changed(self, plan: Any) -> Any:
            return dataclasses.replace(plan, items=[change(item) for item in plan.items])

    with pytest.raises(dcp.api.CheckpointException, match=re.escape(text)) as caught:
        dcp.save(
            {"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, 1), planner=Planner()
        )
    assert "cannot save or load 'w'" in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_field_without_a_value_is_saved(tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = [with_chunk(item, "none") for item in plan.items]
            return dataclasses.replace(plan, items=items)

    state = {"w": torch.ones(2)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, 1), planner=Planner())
    state["w"].zero_()
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert state["w"].sum() == 2


def test_an_unknown_item_is_not_loaded(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, 1))

    class Planner(DefaultLoadPlanner):
        def finish_plan(self, plan: Any) -> Any:
            items = [dataclasses.replace(item, type=Kind.DIFFERENCE) for item in plan.items]
            return dataclasses.replace(plan, items=items)

    reader = StorageReader(tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="found Kind.DIFFERENCE"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=reader, planner=Planner())


def test_an_unknown_keyword_is_refused(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, 1)
    with pytest.raises(ValueError, match="set_up_storage_writer: .* found delta=True"):
        writer.set_up_storage_writer(True, rank=0, delta=True)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    reader = StorageReader(tmp_path)
    with pytest.raises(ValueError, match="found delta=True"):
        reader.set_up_storage_reader(reader.read_metadata(), True, delta=True)
    with pytest.raises(ValueError, match="found delta=True"):
        reader.read_metadata(delta=True)


class Wrapper(torch.Tensor):
    """A subclass over other tensors, like those of quantization."""

    parts: list[torch.Tensor]

    @staticmethod
    def __new__(cls, *parts: torch.Tensor, dtype: torch.dtype) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, parts[0].shape, dtype=dtype)
        made.parts = list(parts)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        for number, part in enumerate(self.parts):
            setattr(self, f"part{number}", part)
        return [f"part{number}" for number in range(len(self.parts))], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(*args[0].parts, dtype=args[0].dtype)
        unwrapped = [each.parts[0] if isinstance(each, cls) else each for each in args]
        result = func(*unwrapped, **(kwargs or {}))
        return args[0] if func is torch.ops.aten.copy_.default else result


FLOATS = torch.arange(6.0).view(2, 3)

REFUSED = {
    "quantized": lambda: Wrapper(FLOATS.to(torch.int8), torch.ones(1), dtype=torch.float32),
    "two of a kind": lambda: Wrapper(FLOATS, FLOATS + 1, dtype=torch.float32),
    "sparse": lambda: FLOATS.to_sparse_csr(),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("is_staged", [False, True])
def test_tensors_without_plain_contents_are_refused(
    tmp_path: Path, kind: str, is_staged: bool
) -> None:
    state = {"model": {"v": torch.ones(2), "w": REFUSED[kind]()}}
    writer = StorageWriter(tmp_path, 1)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(writer.stage(state) if is_staged else state, storage_writer=writer)
    text = str(caught.value)
    if kind == "sparse" and HAS_PUBLIC:  # torch 2.15 itself fails to plan it
        assert "sparse" in text.lower()
    else:
        name = type(state["model"]["w"]).__qualname__
        assert "cannot save tensor 'model.w': expected a dense" in text and name in text
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_wrapper_of_one_tensor_is_saved(tmp_path: Path, is_staged: bool) -> None:
    wrapper = Wrapper(FLOATS.clone(), torch.ones(1), dtype=torch.float32)
    writer = StorageWriter(tmp_path, 1)
    state = {"w": wrapper}
    dcp.save(writer.stage(state) if is_staged else state, storage_writer=writer)
    found = {"w": Wrapper(torch.zeros(2, 3), torch.ones(1), dtype=torch.float32)}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert torch.equal(found["w"].parts[0], FLOATS)


class Pair(NamedTuple):
    first: int
    second: Any


def test_copies_have_the_classes_of_the_values(tmp_path: Path) -> None:
    # A value must not become another one by being copied: JSON cannot store a Counter.
    counter = collections.Counter(a=1)
    tensor = torch.ones(2)
    state: dict[str, Any] = {
        "flattened": collections.defaultdict(list, w=tensor),
        "ordered": collections.OrderedDict(w=tensor),
        "list": [tensor, {"w": tensor}],
        "values": (counter, [counter], Pair(1, counter), {"deep": (counter,)}),
        "numbers": [1, (2, [3])],
    }
    staged = StorageWriter(tmp_path, 1).stage(state)
    tensor.zero_()
    counter["a"] = 2
    assert type(staged["flattened"]) is dict and type(staged["ordered"]) is collections.OrderedDict
    copies = [staged["flattened"]["w"], staged["ordered"]["w"], staged["list"][0]]
    assert all(copied.sum() == 2 for copied in [*copies, staged["list"][1]["w"]])
    first, (second,), pair, deep = staged["values"]
    assert type(pair) is Pair
    for copied in (first, second, pair.second, deep["deep"][0]):
        assert type(copied) is collections.Counter and copied["a"] == 1
    assert staged["numbers"] == [1, (2, [3])] and type(staged["numbers"][1]) is tuple


@pytest.mark.skipif(not HAS_PUBLIC, reason="torch before 2.15 has no CheckpointableTensor")
def test_a_copy_is_planned_like_the_tensor(tmp_path: Path) -> None:
    tensor: Any = torch.arange(24.0).view(4, 6)
    tensor.global_shape = (9, 6)
    tensor.global_offsets, tensor.local_offsets = ((1, 0), (7, 0)), ((0, 0), (3, 0))
    tensor.local_sizes = ((3, 6), (1, 6))
    parameter: Any = torch.nn.Parameter(torch.ones(2))
    parameter.is_shared = True  # an attribute of no meaning to DCP
    staged = StorageWriter(tmp_path, 1).stage({"w": tensor, "p": parameter})
    assert type(staged["w"]) is _staging.StagedPieces and type(staged["p"]) is torch.Tensor
    expected, found = (_create_write_items("w", each) for each in (tensor, staged["w"]))
    assert expected == found
    for item in expected:
        a, b = find_tensor_shard(tensor, item.index), find_tensor_shard(staged["w"], item.index)
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    with pytest.raises(ValueError, match="reads the whole"):
        staged["w"] + 1
