"""Checkpoints of `torch.distributed.checkpoint` (DCP) as Feedline's steps.

>>> import torch.distributed.checkpoint as dcp
>>> from feedline.dcp import StorageReader, StorageWriter
>>> dcp.save(state, storage_writer=StorageWriter("run/ckpt", step))
>>> dcp.load(state, storage_reader=StorageReader("run/ckpt"))    # the newest step

A step appears in the folder when all ranks have written their parts durably; until then, and after
any failure, only the earlier steps are visible. Every byte has a checksum that is compared when it
is read. The tensors are in safetensors files for other programs, too, and a step loads with any
number of ranks and any placements. The folder may be on a file system or on S3 (``s3://...``), and
``feedline ckpt`` lists, verifies, compares, copies and retains its steps.

Weights and Adam's moments are stored under the parameter's name, so that Feedline's trainer and its
exports find them: weights are the tensors below ``"model"``, or at the top of a state without it;
moments are ``exp_avg`` and ``exp_avg_sq`` below ``"optim"`` or ``"optimizer"``. All other tensors
are stored in a group of their own. Values that are no tensors are stored as JSON, never as a
pickle, unless ``allow_pickle=True``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import math
import multiprocessing
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from feedline import _feedline, ckpt
from feedline._names import DTYPES, Names, bytes_of, check_contents, dtype_name, is_wrapper
from feedline._plans import PlanCaches, check_keywords, check_plan, plans_refusal
from feedline._staging import StagesCopies, release_staging
from feedline._values import decoded, encoded
from feedline.ckpt import Step, open_folder, open_step
from feedline.tokens import Url, text_of

__all__ = ["StorageReader", "StorageWriter", "release_staging"]

_BLOB = "dcp.json"
"""The blob of the first writer: the names of the tensors in the state, and who has which value."""

_STEP_MAX = 999_999_999_999
"""The largest number with the 12 digits of a step's folder."""

_SCRATCH_BYTES = 512 << 20
"""Memory for tensors that cannot be read in place: of a GPU, of another type, or with strides."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Orders:
    """The instructions of the coordinator to a writer."""

    recipe: bytes
    """Compressed JSON: the tensors of the state, and the regions that each writer has of them."""
    writer: int
    """The index of this writer in the recipe."""
    token: str
    """Identifies the plan."""
    members: list[str]
    """The processes of all writers, so that each detects the death of another."""
    names: bytes
    """Compressed JSON: the names of the tensors; only for the first writer."""
    room: tuple[int, int]
    """The bytes of all tensors, and the number of their chunks."""


class StorageWriter(StagesCopies, _StorageWriter):
    """Writes one step by `dcp.save` or `dcp.async_save`, in threads or processes.

    Each rank makes its files durable, then the step is committed for all of them or for none. If
    that fails, the last step stays. If a rank raises an error, the save of the others ends within
    seconds. If a rank is killed, this holds only if all ranks share a machine and see each
    other's process ids. Across machines, the save ends when the heartbeat of that rank times out,
    after about a minute, or ten if it dies before it begins to write. With `async_save`, it also
    copies the state, into memory that is reused by the next step.

    `dcp.save` writes contiguous tensors of the host without a copy. It first copies all others of
    this rank, such as those of a GPU, into host memory, which must have room for them.

    A step has at most 1,000,000 chunks of tensors: the weights and moments of 300 parameters, each
    sharded over 1,024 ranks, are 921,600. With more ranks, shard within groups of them (HSDP).

    Args:
        folder: The folder of steps: a path or a URL. Each step is a folder in it.
        step: The number of this step; a step that exists is not overwritten.
        meta: JSON that is stored with the step, for `feedline.ckpt.Step.meta`. Integers are from
            -2**63 to 2**64 - 1.
        allow_pickle: Whether values that JSON cannot store are pickled. Reading them needs the
            same permission, for a pickle can run any code.
        timeout: Seconds after which a save that waits for other ranks fails.
        keep_last: How many of the newest steps each save keeps; it deletes the others. A save of a
            step before the newest one logs a warning and deletes none.
        drain_to: A second folder, such as ``s3://bucket/run``, to which a thread copies each step
            after its commit. Steps that it lacks are not deleted. A step that cannot be copied is
            logged, and the next copy retries it. With ``AsyncCheckpointerType.PROCESS``, the copy
            is part of the save, because threads of that process are killed at exit.
        shard_bytes_max: The most bytes of tensors in a file.
        optimizer: For `async_save`: the optimizer that alone changes the parameters. Parameters
            and its state are then copied while the loop computes gradients, and its next step
            waits for the end of the copy. All other values are copied before the call returns.

    Raises:
        StepExistsError: The step exists already.
        FolderHeldError: Another run saves into this folder.
        AbortedError: Another rank has failed; the text has its error.
        OSError: The store failed, or is full (``ENOSPC``), which is checked before writing.
        ValueError: An argument is out of its range, or a tensor or a value cannot be stored; the
            text names it.

    All except those raised by the constructor are wrapped in `dcp.api.CheckpointException`, with
    the rank that raised them.
    """

    def __init__(
        self,
        folder: Url,
        step: int,
        *,
        meta: Any = None,
        allow_pickle: bool = False,
        timeout: float = 1800,
        keep_last: int | None = None,
        drain_to: Url | None = None,
        shard_bytes_max: int = 4 << 30,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.folder = text_of(folder)
        self.step = int(step)
        self.checkpoint_id = step_url(self.folder, self.step)
        self._meta = json.dumps(meta, allow_nan=False)
        self._allow_pickle = allow_pickle
        self._timeout = float(timeout)
        self._keep_last = keep_last
        self._drain_to = None if drain_to is None else text_of(drain_to)
        self._options = {"shard_bytes_max": int(shard_bytes_max)}
        self._optimizer = optimizer
        # Invalid arguments raise here, where DCP does not wrap the exception.
        self._check_arguments()
        _check_integers(meta, "meta")
        open_folder(self.folder, **self._options)

    def _check_arguments(self) -> None:
        _check("step", self.step, 0 <= self.step <= _STEP_MAX, f"a number from 0 to {_STEP_MAX}")
        _check("timeout", self._timeout, 0 < self._timeout < math.inf, "a finite number above 0")
        keep_last, bytes_max = self._keep_last, self._options["shard_bytes_max"]
        _check("keep_last", keep_last, keep_last is None or keep_last >= 1, "at least 1, or None")
        _check("shard_bytes_max", bytes_max, bytes_max >= 1, "at least 1")

    def __getstate__(self) -> dict[str, Any]:
        # For another process, to which the copy is sent separately.
        return {**self.__dict__, "_optimizer": None, "_copy": None}

    def __repr__(self) -> str:
        return f"StorageWriter({self.folder!r}, {self.step})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta:
        # The first call of a save in each rank, before its planner can fail.
        _plan_caches.start()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Checks the ``checkpoint_id`` of a save. The step is always that of the constructor.

        Raises:
            ValueError: It names another step or another folder.
        """
        if checkpoint_id is None:
            return
        name = text_of(checkpoint_id)
        folder, step = _feedline.split_step(name) or (name, self.step)
        is_own_step = step == self.step and _is_same_folder(folder, self.folder)
        if not is_own_step and not _is_same_folder(name, self.folder):
            raise _conflict(self, "save", name)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        check_keywords(kwargs, ("rank", "use_collectives"), "set_up_storage_writer")
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "cannot save with use_collectives=False: expected ranks that agree on what each of "
                "them writes (hint: leave the argument out)"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        check_plan(plan)
        return dataclasses.replace(plan, storage_data=_feedline.process_identity())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = _plan_caches.completed(plans)
        if not any(plan.usable for plan in plans):
            return plans  # each rank has its last plan, with the instructions of then
        recipe, names = _recipe_of(plans)
        packed = zlib.compress(json.dumps(recipe).encode(), 1)
        token = secrets.token_hex(8)
        members = [cast(str, plan.storage_data) for plan in plans]
        sizes = [_bytes_of(item) for plan in plans for item in plan.items]
        room = (sum(sizes), len(sizes))
        orders = [
            _Orders(packed, writer, token, members, b"" if writer else zlib.compress(names), room)
            for writer in range(len(plans))
        ]
        _plan_caches.keep(plans)
        return [
            dataclasses.replace(plan, storage_data=order)
            for plan, order in zip(plans, orders, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        orders = plan.storage_data
        if not isinstance(orders, _Orders):
            raise plans_refusal()
        _plan_caches.end()
        recipe = zlib.decompress(orders.recipe)
        part = json.dumps(
            {
                "step": self.step,
                "writer": orders.writer,
                "token": f"{orders.token}-{_attempts.next(self.checkpoint_id)}",
                "deadline_s": self._timeout,
                "members": orders.members,
            }
        )
        folder = open_folder(self.folder, **self._options)
        try:
            check_plan(plan)
            if orders.writer == 0:  # the others would count what it has written
                folder.check_room(self.step, *orders.room)
            self.synchronize_staging()
            tensors, blobs = self._contents(plan, planner, orders)
            arrays = [bytes_of(tensor) for tensor in tensors]
        except BaseException as error:
            # The other ranks wait for this one in the store, not in a collective.
            if len(orders.members) > 1:
                try:
                    folder.decline(recipe, part, f"{type(error).__name__}: {error}")
                except Exception as failure:
                    _log.warning("%s: cannot end the save of the other ranks: %s", self, failure)
            raise
        folder.save(recipe, part, arrays, blobs, self._meta, None)
        if orders.writer == 0:
            self._after_commit(folder)
        results = []
        for item in plan.items:
            results.append(WriteResult(item.index, _bytes_of(item), self.step))
        return _done(results)

    def _after_commit(self, folder: Any) -> None:
        if self._keep_last is not None:
            try:
                self._retain(folder, self._keep_last)
            except Exception as error:  # the step is saved; the next save tries again
                _log.warning("%s: old steps are not deleted: %s", self, error)
        if self._drain_to is not None:
            _drains.start(self.folder, self._drain_to)

    def _retain(self, folder: Any, keep_last: int) -> None:
        # After a rollback, steps of the abandoned run are newer than this one, which retention
        # would delete.
        newest = folder.open(None)
        if newest is not None and newest.step == self.step:
            target = None if self._drain_to is None else open_folder(self._drain_to)
            folder.retain(keep_last, None, target)
            return
        found = "none" if newest is None else f"step {newest.step}"
        _log.warning(
            "%s: old steps are not deleted: expected step %d as the newest one, found %s (hint: "
            "move later steps of an abandoned run away)",
            self,
            self.step,
            found,
        )

    def _contents(
        self, plan: SavePlan, planner: SavePlanner, orders: _Orders
    ) -> tuple[list[torch.Tensor], list[tuple[str, bytes]]]:
        """The tensors and the blobs that this rank writes."""
        tensors, values = [], {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = _value_of(planner, item)
                values[item.index.fqn] = encoded(value, item.index.fqn, self._allow_pickle)
            else:
                tensors.append(_host_tensor(planner, item))
        blobs: list[tuple[str, Any]] = []
        if orders.writer == 0:
            names = json.loads(zlib.decompress(orders.names))
            blobs.append((_BLOB, {"format": "feedline-dcp", "version": 1, **names}))
        if values:
            blobs.append((_values_blob(orders.writer), values))
        return tensors, [(name, json.dumps(value, indent=1).encode()) for name, value in blobs]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The writers have committed the step; this only checks that it exists."""
        open_folder(self.folder, **self._options).open(self.step)


class StorageReader(_StorageReader):
    """Reads a step by `dcp.load`, by any number of ranks, into any placements and types.

    Only the blocks that this rank needs are read, and each is compared with its checksum. A
    contiguous tensor in host memory of the stored type is read in place.

    Args:
        folder: The folder of steps, or of one step: a path or a URL. Steps of Feedline's trainer
            are read too: their tensors are ``model.NAME`` and ``optim.state.NAME.exp_avg``.
        step: The number of the step. Default: the newest complete one.
        allow_pickle: Whether pickled values are loaded, which can run any code.

    Raises:
        FileNotFoundError: There is no such step, or none at all; or another process has deleted it
            during the load, as ``keep_last`` of a run does.
        CorruptError: A byte differs from what was saved; the text has the file and the offset.
        ValueError: A value is pickled, and ``allow_pickle`` is not set.
    """

    _gives_raw_bytes = False
    """Whether a planner receives a stored `io.BytesIO` itself. DCP's own would unpickle it."""

    def __init__(
        self, folder: Url, step: int | None = None, *, allow_pickle: bool = False
    ) -> None:
        super().__init__()
        self.folder = text_of(folder)
        self._allow_pickle = allow_pickle
        named = _feedline.split_step(self.folder)
        self._steps_folder = self.folder if named is None else named[0]
        self._is_newest = named is None and step is None
        # Errors must be raised here: DCP hides those of `read_metadata`.
        self._open(step)

    def _open(self, step: int | None) -> None:
        found = open_step(self.folder, step)
        self._names, self._values = _read_names(found)
        self._step = found
        self.step: int = found.step
        self.checkpoint_id = found.folder

    def __repr__(self) -> str:
        return f"StorageReader({self.folder!r}, {self.step})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Checks the ``checkpoint_id`` of a load. If the constructor had no step, it may name one.

        Raises:
            ValueError: It names another step or another folder.
            FileNotFoundError: There is no such step.
        """
        if checkpoint_id is None:
            return
        name = text_of(checkpoint_id)
        folder, step = _feedline.split_step(name) or (name, self.step)
        is_known = step == self.step or self._is_newest
        if not is_known or not _is_same_folder(folder, self._steps_folder):
            raise _conflict(self, "load", name)
        if step != self.step:
            self._open(step)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        check_keywords(kwargs, ("rank",), "read_metadata")
        if kwargs.get("rank") is not None:
            raise FileNotFoundError("a step has no metadata of a single rank")
        entries: dict[str, Any] = {}
        for name, (group, stored) in self._names.places.items():
            entries[name] = _whole(*self._step.entry(stored, group))
        entries.update({name: BytesStorageMetadata() for name in self._values})
        paths = {name: tuple(path) for name, path in self._names.paths.items()}
        return Metadata(entries, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        check_keywords(kwargs, ("rank", "use_collectives"), "set_up_storage_reader")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        check_plan(plan)
        return dataclasses.replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            raise ValueError(
                f"cannot load {self.folder}: expected one step in all ranks, found {steps} (hint: "
                "a step was saved meanwhile; give StorageReader its number)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        check_plan(plan)
        tensors = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickled(item.storage_index.fqn))
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))
        direct: list[tuple[ReadItem, torch.Tensor]] = []
        others: list[tuple[ReadItem, torch.Tensor]] = []
        for item, target in tensors:
            stored = self._stored_dtype(item)
            is_in_memory = target.device.type == "cpu" and not is_wrapper(target)
            is_direct = is_in_memory and target.dtype == stored and target.is_contiguous()
            (direct if is_direct else others).append((item, target))
        self._read(direct)
        batch: list[tuple[ReadItem, torch.Tensor]] = []
        size = 0
        for item, target in others:
            batch.append((item, target))
            size += _bytes(item.lengths, self._stored_dtype(item))
            if size >= _SCRATCH_BYTES:
                self._read_copied(batch)
                batch, size = [], 0
        self._read_copied(batch)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        return _done(None)

    def _read_copied(self, batch: list[tuple[ReadItem, torch.Tensor]]) -> None:
        scratch = [
            (item, torch.empty(item.lengths, dtype=self._stored_dtype(item))) for item, _ in batch
        ]
        self._read(scratch)
        for (_, target), (_, tensor) in zip(batch, scratch, strict=True):
            target.copy_(tensor)

    def _read(self, items: list[tuple[ReadItem, torch.Tensor]]) -> None:
        wants = []
        for item, target in items:
            group, name = self._names.places[item.storage_index.fqn]
            spans = [list(span) for span in zip(item.storage_offsets, item.lengths, strict=True)]
            wants.append((name, group, spans, bytes_of(target)))
        self._step.read_into(wants)

    def _stored_dtype(self, item: ReadItem) -> torch.dtype:
        group, name = self._names.places[item.storage_index.fqn]
        return DTYPES[self._step.entry(name, group)[0]]

    def _pickled(self, name: str) -> io.BytesIO:
        """A value as DCP's planners expect it: pickled here, from the JSON of the step."""
        value = decoded(self._values[name], name, self._allow_pickle)
        if self._gives_raw_bytes and isinstance(value, io.BytesIO):
            return value
        bytes = io.BytesIO()
        torch.save(value, bytes)
        bytes.seek(0)
        return bytes


class _Values(Mapping[str, Any]):
    """The values of a step that are no tensors, as JSON. The blob of a writer is read at the first
    access to one of its values."""

    def __init__(self, step: Step, writers: dict[str, int]) -> None:
        self._step, self._writers = step, writers
        self._read: dict[int, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> Any:
        writer = self._writers[name]
        if writer not in self._read:
            self._read[writer] = json.loads(self._step.blob(_values_blob(writer)))
        return self._read[writer][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._writers)

    def __len__(self) -> int:
        return len(self._writers)


def _values_blob(writer: int) -> str:
    return f"dcp-values-{writer:05}.json"


class _Attempts:
    """How often this process has started to save each step. All ranks have the same counts."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next(self, step: str) -> int:
        self._counts[step] = self._counts.get(step, 0) + 1
        return self._counts[step]


class _Drains:
    """Threads that copy steps to second folders, one per pair. The program exits after they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_new_steps: dict[tuple[str, str], bool] = {}

    def start(self, source: str, target: str) -> None:
        pair = (source, target)
        with self._lock:
            is_running = pair in self._has_new_steps
            self._has_new_steps[pair] = True
        if is_running:
            return
        # The threads of a daemonic process are killed when the program exits.
        if not multiprocessing.current_process().daemon:
            with contextlib.suppress(RuntimeError):  # the process cannot have more threads
                threading.Thread(
                    target=self._run_thread, args=(pair,), name="feedline-drain"
                ).start()
                return
        self._run(pair)

    def _run_thread(self, pair: tuple[str, str]) -> None:
        try:
            self._run(pair)
        except BaseException as error:  # Python would print it, but not log it
            _log.error("the copy of steps to %s has ended: %r", pair[1], error)

    def _run(self, pair: tuple[str, str]) -> None:
        try:
            while self._takes_new_steps(pair):
                try:
                    ckpt.drain(*pair, progress=False)
                except Exception as error:
                    _log.error("a step is not copied: %s", error)
        except BaseException:
            # Otherwise no later save would start a copy.
            with self._lock:
                self._has_new_steps.pop(pair, None)
            raise

    def _takes_new_steps(self, pair: tuple[str, str]) -> bool:
        """Whether there are new steps. If there are none, the copy of this pair has ended."""
        with self._lock:
            if self._has_new_steps[pair]:
                self._has_new_steps[pair] = False
                return True
            del self._has_new_steps[pair]
            return False


_log = logging.getLogger("feedline.ckpt")
_drains = _Drains()
_attempts = _Attempts()
_plan_caches = PlanCaches()


def _recipe_of(plans: list[SavePlan]) -> tuple[dict[str, Any], bytes]:
    """The tensors, the regions that each writer has of them, and the names as JSON."""
    paths: dict[str, Any] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            paths.update(plan.planner_data)
    names = Names.of_state(
        [item.index.fqn for plan in plans for item in plan.items if item.tensor_data is not None],
        paths,
    )
    specs: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    held: list[list[dict[str, Any]]] = []
    for plan in plans:
        regions = []
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            fqn = item.index.fqn
            if fqn not in numbers:
                numbers[fqn] = len(specs)
                group, name = names.places[fqn]
                dtype = dtype_name(data.properties.dtype, fqn)
                shape = list(data.size)
                specs.append({"name": name, "group": group, "dtype": dtype, "shape": shape})
            spans = [list(s) for s in zip(data.chunk.offsets, data.chunk.sizes, strict=True)]
            regions.append({"tensor": numbers[fqn], "region": {"spans": spans, "flat": None}})
        held.append(regions)
    # DCP keeps one of the equal values of several ranks.
    values = {
        item.index.fqn: writer
        for writer, plan in enumerate(plans)
        for item in plan.items
        if item.tensor_data is None
    }
    of_state = {"tensors": names.places, "paths": names.paths, "values": values}
    return {"specs": specs, "held": held}, json.dumps(of_state).encode()


def _read_names(step: Step) -> tuple[Names, Mapping[str, Any]]:
    """The names of a step's tensors in the state, and its values that are no tensors."""
    blobs = step.blobs()
    if _BLOB not in blobs:
        return Names.of_step(step.keys()), {}
    found = json.loads(step.blob(_BLOB))
    if (found.get("format"), found.get("version")) != ("feedline-dcp", 1):
        raise ValueError(
            f"cannot read {step.folder}/{_BLOB}: expected feedline-dcp 1, found "
            f"{found.get('format')} {found.get('version')}"
        )
    return Names.of_json(found), _Values(step, found["values"])


def _host_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor of an item in host memory: without a copy if it is contiguous there."""
    tensor = cast(torch.Tensor, planner.resolve_data(item)).detach()
    assert item.tensor_data is not None
    planned = (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
    if (tensor.dtype, tensor.shape) != planned:
        raise ValueError(
            f"cannot save '{item.index.fqn}': expected {planned[0]} {list(planned[1])} as planned, "
            f"found {tensor.dtype} {list(tensor.shape)} (hint: a planner that keeps its plans does "
            "not see that a type has changed; leave out enable_plan_caching)"
        )
    check_contents(tensor, item.index.fqn)
    tensor = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
    if is_wrapper(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor


def _value_of(planner: SavePlanner, item: WriteItem) -> Any:
    lookup: Callable[[MetadataIndex], Any] | None = getattr(planner, "lookup_object", None)
    return planner.resolve_data(item) if lookup is None else lookup(item.index)


def _whole(dtype: str, shape: list[int]) -> TensorStorageMetadata:
    """One chunk, however the tensor is stored, so that plans request boxes of the whole tensor."""
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), size, [chunk])


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"cannot use {name}: expected {expected}, found {value}")


def _check_integers(value: Any, place: str) -> None:
    """Raises for an integer too large for JSON, which would store it as a float."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(
            f"cannot save {place}: expected an integer from -2**63 to 2**64 - 1, found {value} "
            "(hint: store it as a string)"
        )
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_integers(inner, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_integers(inner, f"{place}[{index}]")


def step_url(folder: str, step: int) -> str:
    """The folder of a step."""
    return _feedline.join_url(folder, f"step-{step:012}")


def _is_same_folder(name: str, folder: str) -> bool:
    """Whether a name refers to this folder. A URL without options is in the same store."""
    (path, options), (own_path, own_options) = _parsed(name), _parsed(folder)
    return path == own_path and options in ("", own_options)


def _parsed(name: str) -> tuple[str, str]:
    """The folder in canonical form, and the options of a URL."""
    options = ""
    if name.startswith(("file:", "s3://")):
        name, _, options = name.partition("?")
    if name.startswith("s3://"):
        return name.rstrip("/"), options
    return os.path.realpath(name.removeprefix("file://").removeprefix("file:")), options


def _conflict(storage: StorageReader | StorageWriter, verb: str, name: str) -> ValueError:
    return ValueError(
        f"cannot {verb} {storage.checkpoint_id}: expected this step as checkpoint_id, found {name} "
        f"(hint: leave checkpoint_id out; {type(storage).__name__} has the folder and the step)"
    )


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else _bytes(data.chunk.sizes, data.properties.dtype)


def _bytes(sizes: torch.Size, dtype: torch.dtype) -> int:
    return torch.Size(sizes).numel() * dtype.itemsize


def _done(value: _T) -> Future[_T]:
    future: Future[_T] = Future()
    future.set_result(value)
    return future
