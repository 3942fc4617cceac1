"""Copies of a state for saves in the background, in memory that is kept from step to step.

The first copy of a state costs its page faults; later ones run at the speed of memory, and that is
all for which the training loop waits.
"""

from __future__ import annotations

import copy
import mmap
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_ALIGN_BYTES = 64


class StagesCopies:
    """What `dcp.async_save` wants of an `AsyncStager`."""

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, which later changes of it do not touch."""
        with torch.no_grad():
            return _Copy(state_dict).made

    def synchronize_staging(self) -> None:
        """The copy is complete when `stage` returns."""

    def close(self) -> None:
        """The memory is kept for other steps; `release_staging` frees it."""


def release_staging() -> None:
    """Frees the memory that is kept for copies. What is still being saved is freed after it."""
    _arenas.release()


class _Leased(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory on loan: a class of its own, because plain arrays have no weak references."""


class _Arenas:
    """Memory for copies, lent whole. It comes back when the last tensor over it is gone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def lend(self, bytes: int, pinned: bool) -> torch.Tensor:
        if pinned:
            # torch keeps pinned memory itself, until the copies into it are done.
            return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)
        with self._lock:
            fitting = [arena for arena in self._free if len(arena) >= bytes]
            if fitting:
                arena = min(fitting, key=len)
                self._free = [other for other in self._free if other is not arena]
            else:
                self._free.clear()  # too small for this state: never two sizes at once
                arena = _fresh(bytes)
        leased = arena.view(_Leased)
        weakref.finalize(leased, self._give_back, arena).atexit = False
        return torch.from_numpy(leased)

    def _give_back(self, arena: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        with self._lock:
            self._free.append(arena)

    def release(self) -> None:
        with self._lock:
            self._free.clear()


_arenas = _Arenas()


def _fresh(bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if bytes == 0:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(-1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages: five hundred times fewer page faults. Where there are none, nothing is lost.
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _Copy:
    """A state whose tensors are copies in one arena."""

    def __init__(self, state: Any) -> None:
        # Of each tensor once, however often the state has it.
        self._tensors: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._find(state)
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors.values()]
        steps = [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes]
        is_cuda = any(tensor.is_cuda for tensor in self._tensors.values())
        arena = _arenas.lend(sum(steps), is_cuda)
        at = 0
        for (key, tensor), size, step in zip(self._tensors.items(), sizes, steps, strict=True):
            into = arena[at : at + size].view(tensor.dtype).view(tensor.shape)
            into.copy_(tensor, non_blocking=True)
            self._copies[key] = into
            at += step
        if is_cuda:
            torch.cuda.synchronize()
        self.made = self._rebuilt(state)

    def _find(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            for local in _locals(value):
                self._tensors.setdefault(id(local), local)
        elif isinstance(value, Mapping):
            for inner in value.values():
                self._find(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                self._find(inner)

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._staged(value)
        if isinstance(value, Mapping):
            return {key: self._rebuilt(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._rebuilt(inner) for inner in value)
        return copy.deepcopy(value)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        copies = [self._copies[id(local)] for local in _locals(tensor)]
        if _is_dtensor(tensor):
            from torch.distributed.tensor import DTensor

            # Not `from_local`, which would move the copy back to the device of the mesh.
            return DTensor(copies[0], tensor._spec, requires_grad=False)  # type: ignore[attr-defined,no-any-return,call-arg]
        if _is_sharded(tensor):
            from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

            shards = zip(copies, tensor.local_shards(), strict=True)  # type: ignore[operator]
            return ShardedTensor._init_from_local_shards_and_global_metadata(  # type: ignore[no-any-return]
                [Shard(local, shard.metadata) for local, shard in shards],
                tensor.metadata(),  # type: ignore[operator]
                process_group=tensor._process_group,  # type: ignore[arg-type]
            )
        return copies[0]


def _locals(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of this rank that a tensor consists of. The same objects at each call."""
    if _is_dtensor(tensor):
        return [tensor._local_tensor]  # type: ignore[attr-defined]
    if _is_sharded(tensor):
        return [shard.tensor for shard in tensor.local_shards()]  # type: ignore[operator]
    return [tensor]


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "_local_tensor")


def _is_sharded(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "ShardedTensor"
