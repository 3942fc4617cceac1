"""Ranks of a Megatron job: ``python megatron_ranks.py FOLDER RANK WORLD STORE``.

They save into ``FOLDER/iter_0000010``, and in the background into ``FOLDER/iter_0000020``. Both are
loaded with other offsets. ``STORE`` is a file for the rendezvous of the ranks. Each exits with 0
if all checks pass.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)

from feedline.megatron import LoadStrategy, SaveStrategy

WHOLE = torch.arange(96, dtype=torch.float32).view(8, 12)
PARTS = 4

# Megatron 0.17 and later prefer a package that needs a GPU.
IN_BACKGROUND: dict[str, Any] = {"async_sharded_save": True}
if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
    IN_BACKGROUND["async_strategy"] = "mcore"


def state_of(rank: int, world: int, axis: int, change: float = 0) -> dict[str, Any]:
    """The state of a rank. ``axis`` is the axis on which the matrices are sharded."""
    shard = torch.chunk(WHOLE + change, world, dim=axis)[rank].contiguous()
    # Layers in one tensor of the shape [PARTS, 3, 4], as Megatron stacks them.
    layers = [torch.full((3, 4), float(layer)).bfloat16() + change for layer in range(PARTS)]
    held = range(rank, PARTS, world)
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("weight", shard, (axis, rank, world)),
            "bias": ShardedTensor.from_rank_offsets(
                "bias", torch.arange(5) + int(change), replica_id=rank
            ),
            "layers": [
                ShardedTensor.from_rank_offsets(
                    "layers.weight", layers[layer], (0, layer, PARTS), prepend_axis_num=1
                )
                for layer in held
            ],
        },
        "optimizer": {
            "exp_avg": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.weight", shard * 2, (axis, rank, world)
            ),
            3: ShardedTensor.from_rank_offsets(
                "optimizer.step", torch.tensor(7 + change), replica_id=rank
            ),
        },
        "rng": [
            ShardedObject("rng_state", {"seed": part, "of": ("x", change)}, (PARTS,), (part,))
            for part in held
        ],
        "extra": ShardedObject("extra", slice(1, int(change)), (1,), (0,), replica_id=rank),
        "here": LocalNonpersistentObject(f"rank {rank}"),
        "iteration": 10,
        "names": ["a", ("b",)],
    }


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """The state without its contents, to load into."""
    for tensor in dist_checkpointing.dict_utils.nested_values(state):
        if isinstance(tensor, ShardedTensor):
            tensor.data = torch.zeros_like(tensor.data)
        elif isinstance(tensor, ShardedObject):
            tensor.data = None
    return state


def plain(state: Any) -> Any:
    """What Megatron returns for a state: tensors and objects in place of their sharded forms."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    if isinstance(state, ShardedTensor | ShardedObject):
        return state.data
    return state.unwrap() if isinstance(state, LocalNonpersistentObject) else state


def assert_equal(found: Any, expected: Any, place: str = "state") -> None:
    assert type(found) is type(expected), place
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_equal(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{place}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), place
    else:
        assert found == expected, place


def load_and_compare(
    folder: str, rank: int, world: int, axis: int, change: float = 0, **options: Any
) -> None:
    expected = plain(state_of(rank, world, axis, change))
    state = emptied(state_of(rank, world, axis))
    assert_equal(dist_checkpointing.load(state, folder, LoadStrategy(), **options), expected)


def save_in_background(folder: str, rank: int, world: int) -> None:
    """Saves while the state changes, as Megatron's queue of requests does, without its GPU."""
    strategy = SaveStrategy()
    state = state_of(rank, world, 0)
    tensors = list(dist_checkpointing.dict_utils.nested_values(state["model"]))
    request = dist_checkpointing.save(state, folder, strategy, **IN_BACKGROUND)
    for tensor in tensors:
        tensor.data.zero_()
    request.execute_sync()


def main() -> None:
    folder, store = Path(sys.argv[1]), sys.argv[4]
    rank, world = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist_checkpointing.save(state_of(rank, world, 0), f"{folder}/iter_0000010", SaveStrategy())
    save_in_background(f"{folder}/iter_0000020", rank, world)
    for name in ("iter_0000010", "iter_0000020"):
        load_and_compare(f"{folder}/{name}", rank, world, 1)
    if "process_group" in inspect.signature(dist_checkpointing.load).parameters:
        alone = dist.new_group([0])
        if rank == 0:
            load_and_compare(f"{folder}/iter_0000010", 0, 1, 0, process_group=alone)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
