"""One rank of several: ``python dcp_ranks.py FOLDER VERB RANK WORLD STORE [TENSORS]``.

``VERB`` is ``save``, ``load`` or one of `VERBS`, ``STORE`` a file for the rendezvous of the ranks.
Each exits with 0 if its checks pass.
"""

from __future__ import annotations

import collections
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from feedline import AbortedError, ckpt
from feedline.dcp import StorageReader, StorageWriter

TENSORS = int(sys.argv[6]) if len(sys.argv) > 6 else 10_000


def tensor_of(number: int) -> torch.Tensor:
    """The contents of a tensor: no two are equal."""
    shape = (number % 13 + 1, number % 7 + 1)
    flat = torch.arange(shape[0] * shape[1], dtype=torch.float64) + 1000.5 * number
    return flat.view(shape).to([torch.float32, torch.bfloat16, torch.int64][number % 3])


def state_of(mesh: DeviceMesh, layouts: list[list[Any]]) -> dict[str, Any]:
    """All tensors: one of four is replicated, the others are sharded by the layouts in turn."""
    model: dict[str, torch.Tensor] = {}
    for number in range(TENSORS):
        tensor = tensor_of(number)
        if number % 4:
            layout = layouts[number % len(layouts)]
            tensor = distribute_tensor(tensor, mesh, layout, src_data_rank=None)
        model[f"layers.{number}.weight"] = tensor
    return {"model": model, "step": 9}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(folder: str, world: int) -> None:
    shape = (2, world // 2) if world % 2 == 0 else (1, world)
    mesh = dist.init_device_mesh("cpu", shape)
    layouts = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]]
    state = state_of(mesh, layouts)
    dcp.save(state, storage_writer=StorageWriter(folder, 9))


def load(folder: str, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))
    layouts = [[Shard(1)], [Shard(0)], [Replicate()]]
    expected = state_of(mesh, layouts)
    found: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in expected["model"].items()},
        "step": None,
    }
    dcp.load(found, storage_reader=StorageReader(folder))
    assert found["step"] == 9
    for name, tensor in expected["model"].items():
        assert torch.equal(local(found["model"][name]), local(tensor)), name


def sharded(folder: str, rank: int, world: int) -> None:
    """A legacy ShardedTensor and a staged DTensor, saved in the background, in threads and
    processes, and loaded as whole tensors."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    whole = torch.arange(60, dtype=torch.float32).view(10, 6)
    spec = ChunkShardingSpec(0, [f"rank:{n}/cpu" for n in range(world)])
    legacy = sharded_tensor.zeros(spec, 10, 6)
    (shard,) = legacy.local_shards()
    first, (rows, _) = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes
    shard.tensor.copy_(whole[first : first + rows])
    mesh = dist.init_device_mesh("cpu", (world,))
    for step, kind in enumerate(AsyncCheckpointerType):
        new = distribute_tensor(whole + step, mesh, [Shard(1)])
        state: dict[str, Any] = {"model": {"new": new}}
        if kind is AsyncCheckpointerType.THREAD:
            state["model"]["legacy"] = legacy  # it cannot be sent to a process
        writer = StorageWriter(folder, step)
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        new.to_local().zero_()
        future.result()
        found: dict[str, Any] = {"model": {key: torch.zeros(10, 6) for key in state["model"]}}
        dcp.load(found, storage_reader=StorageReader(folder, step))
        assert torch.equal(found["model"]["new"], whole + step), kind
        if "legacy" in state["model"]:
            assert torch.equal(found["model"]["legacy"], whole)


def refused(folder: str, rank: int, world: int) -> None:
    """One rank has a value that cannot be stored: the save of all ranks fails and names it."""
    state: dict[str, Any] = {"model": {f"{rank}.w": torch.ones(3)}}
    if rank == world - 1:
        state["when"] = object()
    try:
        dcp.save(state, storage_writer=StorageWriter(folder, 1))
    except dcp.api.CheckpointException as error:
        raised = {rank: exception for rank, (exception, _) in error.failures.items()}
        assert isinstance(raised.pop(world - 1), ValueError)
        assert raised
        for exception in raised.values():
            assert isinstance(exception, AbortedError), exception
            assert "'when'" in str(exception) and f"writer {world - 1} of" in str(exception)
    else:
        raise AssertionError("it was saved")
    # The same step again, after a save that failed in one rank before it was written.
    state.pop("when", None)

    class Fails(DefaultSavePlanner):
        def set_up_planner(self, *args: Any, **options: Any) -> None:
            super().set_up_planner(*args, **options)
            if rank == 0:
                raise RuntimeError("no plan")

    for planner in (Fails(), None):
        try:
            dcp.save(state, storage_writer=StorageWriter(folder, 1), planner=planner)
        except dcp.api.CheckpointException as error:
            assert planner is not None, error
    assert StorageReader(folder).step == 1


class Rows(torch.Tensor):
    """Two ranges of rows of a tensor, in a tensor that only DCP's protocol describes."""

    ranges: list[tuple[int, int, torch.Tensor]]

    @staticmethod
    def of(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> Rows:
        made: Rows = torch.Tensor._make_wrapper_subclass(Rows, tensor.shape, dtype=tensor.dtype)
        made.ranges = [(at, end, tensor[at:end].clone()) for at, end in ranges]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of rows")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([at, 0]), rows.shape) for at, _, rows in self.ranges
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return {at: rows for at, _, rows in self.ranges}[index.offset[0]]


WHOLE = torch.arange(66, dtype=torch.float32).view(11, 6)


def ranges_of(rank: int, world: int) -> list[tuple[int, int]]:
    """The rows of a rank: two ranges, of which no two have the same length."""
    cuts = [n * 11 // (2 * world) for n in range(2 * world + 1)]
    return [(cuts[n], cuts[n + 1]) for n in (rank, 2 * world - 1 - rank)]


def public(whole: torch.Tensor, ranges: list[tuple[int, int]]) -> Any:
    """The rows as a ``CheckpointableTensor``: local memory with a row of padding in front."""
    rows = [whole[at:end] for at, end in ranges]
    local: Any = torch.cat([torch.full((1, 6), -1.0), *rows])
    starts = (1, 1 + len(rows[0]))
    local.global_shape = tuple(whole.shape)
    local.global_offsets = tuple((at, 0) for at, _ in ranges)
    local.local_offsets = tuple((start, 0) for start in starts)
    local.local_sizes = tuple(tuple(each.shape) for each in rows)
    return local


def uneven(whole: torch.Tensor, rank: int, world: int, mesh: DeviceMesh) -> DTensor:
    """A `DTensor` whose local tensor has attributes with its rows, as Megatron's FSDP makes it."""
    ends = [0, *(11 - 2 * (world - n) for n in range(1, world)), 11]
    rows = Rows.of(whole, [(ends[rank], ends[rank + 1])])
    ((_, _, local),) = rows.ranges
    made = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    held: Any = made._local_tensor
    held.__create_write_items__ = rows.__create_write_items__
    held.__create_chunk_list__ = rows.__create_chunk_list__
    return made


def state_in_pieces(whole: torch.Tensor, rank: int, world: int) -> dict[str, Any]:
    """A tensor of every class that DCP saves in pieces, in containers that it flattens."""
    mesh = dist.init_device_mesh("cpu", (world,))
    ranges = ranges_of(rank, world)
    state: dict[str, Any] = {
        "model": {"rows": Rows.of(whole, ranges)},
        "list": [collections.defaultdict(None, uneven=uneven(whole, rank, world, mesh))],
    }
    if hasattr(dcp, "CheckpointableTensor"):  # torch 2.15
        state["model"]["public"] = public(whole, ranges)
    return state


def pieces(folder: str, rank: int, world: int) -> None:
    """Tensors that only DCP's protocols describe, saved in each way, and loaded again."""
    for step, kind in enumerate((None, *AsyncCheckpointerType)):
        writer = StorageWriter(folder, step)
        state = state_in_pieces(WHOLE + step, rank, world)
        if kind is None:
            dcp.save(state, storage_writer=writer)
        else:
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
            for tensor in tensors_in_pieces(state):
                tensor.zero_()
            future.result()
    load_pieces(folder, rank, world)


def tensors_in_pieces(state: dict[str, Any]) -> list[torch.Tensor]:
    """The memory of all pieces of this rank."""
    held = [rows for _, _, rows in state["model"]["rows"].ranges]
    held.append(state["list"][0]["uneven"].to_local())
    return [*held, *([state["model"]["public"]] if "public" in state["model"] else [])]


def load_pieces(folder: str, rank: int, world: int) -> None:
    for step in range(3):
        expected = state_in_pieces(WHOLE + step, rank, world)
        found = state_in_pieces(torch.full_like(WHOLE, -1.0), rank, world)
        dcp.load(found, storage_reader=StorageReader(folder, step))
        for a, b in zip(tensors_in_pieces(found), tensors_in_pieces(expected), strict=True):
            assert torch.equal(a, b), (step, a, b)
        plain = {"model": {key: torch.zeros_like(WHOLE) for key in found["model"]}}
        dcp.load(plain, storage_reader=StorageReader(folder, step))
        assert all(torch.equal(each, WHOLE + step) for each in plain["model"].values())


def cached(folder: str, rank: int, world: int) -> None:
    """Plans are cached, and some saves fail while they are planned or written."""
    step = 0

    def saved(state: dict[str, Any], *more: str, error: str = "") -> None:
        """Saves the next step, which has these tensors more, or fails with an error."""
        nonlocal step
        step += 1
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = StorageWriter(folder, step, timeout=60)
        try:
            dcp.save(state, storage_writer=writer, planner=planner)
        except dcp.api.CheckpointException as failure:
            assert error and error in str(failure), failure
            return
        assert not error
        names = [f"{n}.w" for n in range(world)] + list(more)
        assert sorted(name for _, name in ckpt.open(folder, step).keys()) == sorted(names)
        found = {
            key: {name: torch.zeros_like(tensor) for name, tensor in each.items()}
            for key, each in state.items()
        }
        dcp.load(found, storage_reader=StorageReader(folder, step))
        for key, each in state.items():
            assert all(torch.equal(found[key][name], each[name]) for name in each), key

    is_last = rank == world - 1
    weight = torch.full((2,), float(rank))
    state: dict[str, Any] = {str(rank): {"w": weight}}
    # Planning fails if rank 0 has this; meanwhile the last rank has a tensor more.
    bad = {"bad": {"c": torch.ones(2, dtype=torch.complex128)}} if rank == 0 else {}
    later = {"b": {"v": torch.ones(3)}} if is_last else {}
    saved(state)
    weight += 1
    saved(state)
    saved({**state, **later, **bad}, error="complex128")
    saved({**state, **later}, "b.v")  # the last rank has the plan of the failed save
    saved({**state, **later}, "b.v")
    saved({**state, **later, **bad}, error="complex128")
    saved(state)  # the state of an earlier save
    # This fails while it is written.
    saved({**state, **({"when": object()} if is_last else {})}, error="when")
    saved(state)
    # Only one rank has another plan: those of the others are not sent.
    late = {"late": {"v": torch.ones(1)}} if rank == 0 else {}
    saved({**state, **late}, "late.v")
    saved({**state, **late}, "late.v")
    assert ckpt.verify(folder)["ok"]


VERBS = {
    "sharded": sharded,
    "refused": refused,
    "pieces": pieces,
    "load-pieces": load_pieces,
    "cached": cached,
}


def main() -> None:
    folder, verb, store = sys.argv[1], sys.argv[2], sys.argv[5]
    rank, world = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if verb in VERBS:
        VERBS[verb](folder, rank, world)
    else:
        {"save": save, "load": load}[verb](folder, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
