"""One rank of several: ``python dcp_ranks.py FOLDER VERB RANK WORLD STORE [TENSORS]``.

``VERB`` is ``save``, ``load``, ``sharded`` or ``refused``, ``STORE`` a file for the rendezvous of
the ranks. Each exits with 0 if its checks pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from feedline import AbortedError
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
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

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


def main() -> None:
    folder, verb, store = sys.argv[1], sys.argv[2], sys.argv[5]
    rank, world = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if verb in ("sharded", "refused"):
        {"sharded": sharded, "refused": refused}[verb](folder, rank, world)
    else:
        {"save": save, "load": load}[verb](folder, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
