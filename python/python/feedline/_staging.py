"""Copies of a state for saves in the background, in memory that is reused from step to step.

The first copy of a state incurs page faults; later ones run at memory speed. With an optimizer, the
tensors that it changes are copied while the loop computes gradients, and the loop waits for the end
of the copy before the optimizer's next step.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard import sharded_tensor as _sharded_tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from feedline import _feedline
from feedline._names import bytes_of, check_contents, is_wrapper

# It does not declare its names as exported.
sharded_tensor: Any = _sharded_tensor

_ALIGN_BYTES = 64

_LARGE_BYTES = 1 << 20
"""Tensors of at least this size are copied by several threads; below, a call costs more."""

_PINNED_BYTES = 1 << 30
"""The most pinned memory in one allocation."""

_THREADS = min(8, os.cpu_count() or 1)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class StagesCopies:
    """The interface of DCP's `AsyncStager`, for `dcp.async_save`."""

    _synchronize_after_execute = False
    _optimizer: torch.optim.Optimizer | None = None
    _copy: _Copy | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, which later changes of the state do not affect."""
        with torch.no_grad():
            self._copy = _Copy(state_dict, self._optimizer)
            return self._copy.finish_state(state_dict)

    def synchronize_staging(self) -> None:
        """Waits until the copy is complete."""
        if self._copy is not None:
            self._copy.wait()

    def close(self) -> None:
        """Does nothing: the memory is reused by later steps, and `release_staging` frees it."""


def release_staging() -> None:
    """Frees the cached memory for copies, except copies that are still being saved."""
    _arenas.release()
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        torch._C._host_emptyCache()


class _Leased(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory in use: a subclass, because plain arrays have no weak references."""


class _Arenas:
    """Memory for copies. An arena is reused after the last tensor over it is freed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[Bytes] = []

    def allocate(self, bytes: int, pinned: bool) -> torch.Tensor:
        if pinned:
            # torch caches pinned memory itself, until copies into it are complete.
            return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)
        with self._lock:
            fitting = [arena for arena in self._free if len(arena) >= bytes]
            if fitting:
                arena = min(fitting, key=len)
                self._free = [other for other in self._free if other is not arena]
            else:
                self._free.clear()  # too small for this state: never keep two sizes
                arena = _map_memory(bytes)
        leased = arena.view(_Leased)
        weakref.finalize(leased, self._reclaim, arena).atexit = False
        return torch.from_numpy(leased)

    def _reclaim(self, arena: Bytes) -> None:
        with self._lock:
            self._free.append(arena)

    def release(self) -> None:
        with self._lock:
            self._free.clear()


_arenas = _Arenas()


def _map_memory(bytes: int) -> Bytes:
    # No huge pages: with a full page cache, the kernel took seconds to allocate them.
    if bytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(
        mmap.mmap(-1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )


class _Staged(dict[str, Any]):
    """A state whose copy may be incomplete. Pickling it for another process waits for the copy."""

    copy_of: _Copy | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.copy_of is not None:
            self.copy_of.wait()
        return (dict, (dict(self),))


class _Copy:
    """A state whose tensors are copies in reused memory."""

    def __init__(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        # Each tensor once, even if the state has it several times.
        self._forms: dict[int, _Form] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._find(state, "")
        self._copies: dict[int, torch.Tensor] = {}
        later = set() if optimizer is None else set(_storages(optimizer))
        parts: tuple[list[_Part], list[_Part]] = ([], [])
        for arena, at, tensor in _places(list(self._tensors.values())):
            size = tensor.numel() * tensor.element_size()
            into = arena[at : at + size].view(tensor.dtype).view(tensor.shape)
            self._copies[id(tensor)] = into
            parts[_storage(tensor) in later].append((arena, at, into, tensor))
        self._error: BaseException | None = None
        self._events: list[Any] = []
        self._thread: threading.Thread | None = None
        _copy_parts(parts[0])
        for device in _cuda_devices(parts[0]):
            torch.cuda.current_stream(device).synchronize()
        if parts[1] and optimizer is not None:
            self._copy_until_step(parts[1], optimizer)

    def finish_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with the copies. Afterwards only the state keeps their memory alive."""
        made = _Staged(self._rebuilt(state))
        made.copy_of = self
        self._forms.clear()
        self._tensors.clear()
        self._copies.clear()
        return made

    def wait(self) -> None:
        """Waits until the copy is complete.

        Raises:
            Exception: The error of the copy.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        for event in self._events:
            event.synchronize()

    def wait_before_step(self) -> None:
        """Waits, for the next step of the optimizer. `wait` raises errors, in the save."""
        if self._thread is not None:
            self._thread.join()
        for event in self._events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def _copy_until_step(self, parts: list[_Part], optimizer: torch.optim.Optimizer) -> None:
        _hooks.add(optimizer, self)
        # Devices copy in another stream than the loop; its next step waits for an event.
        cuda: Any = torch.cuda
        for device in _cuda_devices(parts):
            stream = cuda.Stream(device)
            stream.wait_stream(cuda.current_stream(device))
            mine = [part for part in parts if part[3].device == device]
            with cuda.stream(stream):
                _copy_parts(mine)
            for *_, tensor in mine:
                tensor.record_stream(stream)
            self._events.append(stream.record_event())
        on_host = [part for part in parts if not part[3].is_cuda]
        if not on_host:
            return

        def run() -> None:
            try:
                with torch.no_grad():
                    _copy_parts(on_host)
            except BaseException as error:  # raised by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="feedline-stage", daemon=True)
        self._thread.start()

    def _find(self, value: Any, name: str, is_leaf: bool = False) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) in self._forms:
                return
            form = _form_of(value, name)
            try:
                for local in form.locals:
                    check_contents(local, name)
            except ValueError:
                # The save refuses it, too, and then ends the save of the other ranks.
                form = _Form(value, [], lambda _: value)
            self._forms[id(value)] = form
            self._tensors.update({id(local): local for local in form.locals})
        elif _class_of_copy(value, is_leaf) is not None:
            is_leaf = is_leaf or not _is_flattened(value)
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, inner in pairs:
                self._find(inner, f"{name}.{key}" if name else str(key), is_leaf)

    def _rebuilt(self, value: Any, is_leaf: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            form = self._forms[id(value)]
            return form.rebuild([self._copies[id(local)] for local in form.locals])
        kind = _class_of_copy(value, is_leaf)
        if kind is None:
            return copy.deepcopy(value)
        is_leaf = is_leaf or not _is_flattened(value)
        if isinstance(value, Mapping):
            return kind((key, self._rebuilt(inner, is_leaf)) for key, inner in value.items())
        return kind(self._rebuilt(inner, is_leaf) for inner in value)


def _class_of_copy(value: Any, is_leaf: bool) -> type | None:
    """The class of the copy of a container, or None for a value that `copy.deepcopy` copies."""
    if type(value) in (dict, OrderedDict, list, tuple):
        return type(value)
    if is_leaf or not _is_flattened(value):
        return None  # a value, which another class would change
    return dict if isinstance(value, Mapping) else list


def _is_flattened(value: Any) -> bool:
    """Whether DCP saves the contents of a container, instead of the container as one value."""
    if isinstance(value, list):
        return any(isinstance(inner, torch.Tensor) or _is_flattened(inner) for inner in value)
    return isinstance(value, Mapping)


_Part = tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]
"""An arena, the offset of a copy in it, the copy, and the tensor."""


def _places(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """An arena and an offset in it for each tensor. Tensors of devices use pinned memory, which
    torch allocates in powers of two: arenas of bounded size waste less of it."""
    places = []
    for is_cuda in (False, True):
        bins: list[tuple[int, list[tuple[int, torch.Tensor]]]] = [(0, [])]
        for tensor in tensors:
            if tensor.is_cuda != is_cuda:
                continue
            size = tensor.numel() * tensor.element_size()
            end, inside = bins[-1]
            if is_cuda and inside and end + size > _PINNED_BYTES:
                end, inside = 0, []
                bins.append((end, inside))
            inside.append((end, tensor))
            bins[-1] = (end + -(-size // _ALIGN_BYTES) * _ALIGN_BYTES, inside)
        for end, inside in bins:
            if inside:
                arena = _arenas.allocate(end, is_cuda)
                places += [(arena, at, tensor) for at, tensor in inside]
    return places


def _copy_parts(parts: list[_Part]) -> None:
    large = []
    for arena, at, into, tensor in parts:
        is_in_memory = tensor.device.type == "cpu" and not is_wrapper(tensor)
        is_resolved = not tensor.is_conj() and not tensor.is_neg()
        is_plain = is_in_memory and is_resolved and tensor.is_contiguous()
        if is_plain and tensor.numel() * tensor.element_size() >= _LARGE_BYTES:
            large.append((at, bytes_of(tensor)))
            of_large = arena  # tensors in host memory share one arena
        else:
            into.copy_(tensor, non_blocking=tensor.is_cuda)
    if large:
        _feedline.copy_all(of_large.numpy(), large, _THREADS)


def _cuda_devices(parts: list[_Part]) -> list[torch.device]:
    return list(dict.fromkeys(part[3].device for part in parts if part[3].is_cuda))


class _Hooks:
    """Makes an optimizer wait for copies of its tensors before its next step. The hook of an
    optimizer is never removed: torch does not let a hook remove itself while it runs."""

    def __init__(self) -> None:
        self._pending: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Copy]]
        self._pending = weakref.WeakKeyDictionary()

    def add(self, optimizer: torch.optim.Optimizer, copy_of: _Copy) -> None:
        if optimizer not in self._pending:
            self._pending[optimizer] = []
            optimizer.register_step_pre_hook(self._before_step)
        self._pending[optimizer].append(copy_of)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        pending = self._pending[optimizer]
        for each in pending:
            each.wait_before_step()
        pending.clear()


_hooks = _Hooks()


def _storages(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """The memory that the steps of an optimizer change."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
            for tensor in tensors:
                # One that cannot be saved is not in the state.
                with contextlib.suppress(ValueError):
                    if isinstance(tensor, torch.Tensor):
                        yield from map(_storage, _form_of(tensor, "").locals)


def _storage(tensor: torch.Tensor) -> int:
    return check_contents(tensor, "").untyped_storage().data_ptr()


@dataclasses.dataclass(frozen=True)
class _Form:
    """What a tensor consists of."""

    tensor: torch.Tensor
    """The tensor, which keeps its `id` from being reused."""
    locals: list[torch.Tensor]
    """The parts of it that this rank has."""
    rebuild: Callable[[list[torch.Tensor]], torch.Tensor]
    """A tensor that DCP saves like the original, from copies of the parts in host memory."""


def _form_of(tensor: Any, name: str) -> _Form:
    """The form of a tensor: its copy has the same class if DCP then plans the same for it.

    Raises:
        ValueError: DCP would save it as something else than parts of one tensor.
    """
    if type(tensor) is DTensor:
        local: torch.Tensor = tensor._local_tensor
        # A rank outside of the mesh saves nothing.
        is_known = _is_ordinary(tensor) and _is_ordinary(local)
        is_known = is_known or tensor.device_mesh.get_coordinate() is None
        if is_known or _is_planned_as(tensor, _dtensor(tensor, _meta_like(local))):
            return _Form(tensor, [local], lambda copies: _dtensor(tensor, copies[0]))
    elif type(tensor) is sharded_tensor.ShardedTensor:
        if not hasattr(tensor, "__create_write_items__"):
            locals = [shard.tensor for shard in tensor.local_shards()]
            return _Form(tensor, locals, lambda copies: _sharded(tensor, copies))
    elif _is_ordinary(tensor) or _is_planned_as(tensor, _meta_like(tensor)):
        return _Form(tensor, [tensor], lambda copies: copies[0])
    return _form_of_pieces(tensor, name)


def _form_of_pieces(tensor: torch.Tensor, name: str) -> _Form:
    items = _create_write_items("", tensor)
    for item in items:
        if item.type not in (WriteItemType.SHARD, WriteItemType.TENSOR) or item.index.fqn:
            kind = type(tensor)
            raise ValueError(
                f"cannot copy '{name}': expected a tensor that DCP saves as pieces of it, found "
                f"{kind.__module__}.{kind.__qualname__}, which it saves as {item.type.name} of "
                f"'{name}{item.index.fqn}' (hint: dcp.save needs no copy)"
            )
    pieces = [find_tensor_shard(tensor, item.index) for item in items]
    shape, dtype = tensor.shape, tensor.dtype
    return _Form(tensor, pieces, lambda copies: StagedPieces(shape, dtype, items, copies))


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no attributes, by which DCP might save it as another one."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, DTensor) and not vars(tensor)


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same type and size, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_planned_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether DCP saves a tensor as it would save the other one."""
    plans = [
        [
            (item.type, item.index, data and (data.chunk, data.size, data.properties.dtype))
            for item in _create_write_items("", each)
            for data in (item.tensor_data,)
        ]
        for each in (tensor, other)
    ]
    return plans[0] == plans[1]


class StagedPieces(torch.Tensor):
    """Copies of the pieces of a tensor that DCP saves in pieces by one of its protocols.

    DCP's planners get the same items for it as for the original, and the copies for these items.
    Unlike attributes of a tensor, these remain when it is sent to another process.
    """

    _items: list[WriteItem]
    _pieces: list[torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        items: list[WriteItem],
        pieces: list[torch.Tensor],
    ) -> StagedPieces:
        made: StagedPieces = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made._items, made._pieces = items, pieces
        return made

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=fqn))
            for item in self._items
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for item, piece in zip(self._items, self._pieces, strict=True):
            if item.index.offset == index.offset:
                return piece
        raise ValueError(
            f"cannot save '{index.fqn}': expected a piece at {index.offset}, found pieces at "
            f"{[item.index.offset for item in self._items]}"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (StagedPieces, (self.shape, self.dtype, self._items, self._pieces))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StagedPieces({list(self.shape)}, {len(self._pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise ValueError(
            f"cannot compute {func} of a copy for a save: expected a planner that saves the pieces "
            "of tensors by DCP's protocol, found one that reads the whole (hint: use dcp.save)"
        )


def _dtensor(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    # Not `from_local`, which would move the copy back to the device of the mesh.
    kind: Any = DTensor
    return kind(local, tensor._spec, requires_grad=False)  # type: ignore[no-any-return]


def _sharded(tensor: Any, copies: list[torch.Tensor]) -> torch.Tensor:
    shards = zip(copies, tensor.local_shards(), strict=True)
    make = sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata
    is_pinned = any(local.is_pinned() for local in copies)
    return make(  # type: ignore[no-any-return]
        [sharded_tensor.Shard(local, _on_host(shard.metadata)) for local, shard in shards],
        _metadata_on_host(tensor.metadata(), is_pinned),
        process_group=tensor._process_group,
    )


def _metadata_on_host(metadata: Any, is_pinned: bool) -> Any:
    """The metadata of a `ShardedTensor` whose shards are copies in host memory."""
    return dataclasses.replace(
        metadata,
        shards_metadata=[_on_host(shard) for shard in metadata.shards_metadata],
        tensor_properties=dataclasses.replace(
            metadata.tensor_properties, pin_memory=is_pinned, requires_grad=False
        ),
    )


def _on_host(shard: Any) -> Any:
    """The metadata of a shard in host memory: ``rank:3/cpu`` for ``rank:3/cuda:1``."""
    owner, _, _ = str(shard.placement).rpartition("/")
    return type(shard)(list(shard.shard_offsets), list(shard.shard_sizes), f"{owner}/cpu")
