"""Folders of checkpoints: the commands of ``feedline ckpt`` as functions, and steps to read from.

>>> from feedline import ckpt
>>> ckpt.ls("run/ckpt")["newest"]
12000
>>> ckpt.verify("run/ckpt")["ok"]
True
>>> ckpt.open("run/ckpt").read("lm_head.weight")     # a numpy array; verified

`feedline.dcp` saves and loads steps in training loops of torch, `feedline.safetensors` has the
functions of the package of that name. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline import _feedline
from feedline.tokens import Url, text_of
from feedline.verbs import OnProgress, _Line

__all__ = ["Step", "diff", "drain", "ls", "open", "retain", "verify"]

_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E4M3FNUZ": "u1",
    "F8_E5M2FNUZ": "u1",
    "F8_E8M0": "u1",
    "F4_X2": "u1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}
"""Types of numpy. BF16 and floats of 8 bits or 4, which it lacks, are integers with the same bits.
An element of ``F4_X2`` is a byte with two floats, the first in the lower half."""

_FOLDERS_MAX = 16

_folders: dict[tuple[int, str], _feedline.Checkpoints] = {}
_folders_lock = threading.Lock()


def _replace_lock() -> None:
    global _folders_lock
    _folders_lock = threading.Lock()


# Another thread may have held it during the fork.
os.register_at_fork(after_in_child=_replace_lock)


def open_folder(folder: Url, **options: Any) -> _feedline.Checkpoints:
    """The folder of steps. A process has one lease for it, and changes it one call at a time."""
    name = text_of(folder)
    path, mark, query = name.partition("?") if is_url(name) else (name, "", "")
    if path.startswith("s3://"):
        place = name = path.rstrip("/") + mark + query
    elif path.startswith("file:"):
        place = os.path.realpath(path.removeprefix("file:").removeprefix("//")) + mark + query
    elif is_url(path):
        place = name
    else:
        place = name = os.path.realpath(path)
    key = (os.getpid(), place)
    with _folders_lock:
        found = _folders.pop(key, None) or _feedline.Checkpoints(name)
        _folders[key] = found
        while len(_folders) > _FOLDERS_MAX:
            del _folders[next(iter(_folders))]
    return found.with_options(json.dumps(options)) if options else found


def is_url(name: str) -> bool:
    """Whether a name is a URL, and not a path."""
    return "://" in name or name.startswith(("s3:", "file:"))


def open_step(folder: Url, step: int | None = None) -> Step:
    """As `open`."""
    name = text_of(folder)
    split = _feedline.split_step(name)
    if split is not None:
        name, named = split
        if step is not None and step != named:
            raise ValueError(
                f"cannot open step {step} of {text_of(folder)}: expected a folder of steps, found "
                "one step"
            )
        step = named
    found = open_folder(name).open(step)
    if found is None:
        raise FileNotFoundError(2, "cannot open the newest step: expected one, found none", name)
    return Step(found)


def open(folder: Url, step: int | None = None) -> Step:
    """A step to read from.

    Args:
        folder: The folder of steps, or the folder of a step: a path or a URL.
        step: The number of the step. Default: the newest complete one.

    Raises:
        FileNotFoundError: There is no such step, or none at all.
        CorruptError: Its manifest is damaged, or a file has another length.
    """
    return open_step(folder, step)


class Step:
    """A complete step. Every byte that it returns has been compared with its checksum."""

    def __init__(self, inner: _feedline.Checkpoint) -> None:
        self._inner = inner
        self._entries = {
            (group, name): (dtype, shape) for name, group, dtype, shape in inner.tensors()
        }

    def __repr__(self) -> str:
        return f"Step({self.folder!r})"

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._inner.step

    @property
    def folder(self) -> str:
        """The folder of the step."""
        return self._inner.folder

    @property
    def meta(self) -> Any:
        """The JSON that was stored with the step."""
        return json.loads(self._inner.meta())

    def keys(self) -> list[tuple[str, str]]:
        """Group and name of every tensor, in the order of the save. The groups are ``model``,
        ``master``, ``exp_avg``, ``exp_avg_sq`` and ``other``."""
        return list(self._entries)

    def entry(self, name: str, group: str = "model") -> tuple[str, list[int]]:
        """Type, by its name in safetensors, and shape of a tensor. ``F4_X2`` are pairs of ``F4``.

        Raises:
            KeyError: There is no such tensor; the text has those with similar names.
        """
        if (group, name) not in self._entries:
            self._inner.tensor(name, group)  # raises, with similar names
        return self._entries[(group, name)]

    def read(
        self, name: str, group: str = "model", box: Sequence[tuple[int, int]] | None = None
    ) -> np.ndarray[Any, Any]:
        """A tensor, or a box of it.

        Args:
            name: The name of the tensor.
            group: Its group.
            box: ``(start, length)`` on each axis. Only the blocks that overlap it are read.

        Returns:
            An array of the shape of the tensor or the box. BF16 and the 8-bit floats, which numpy
            does not have, are returned as integers with the same bits.

        Raises:
            KeyError: There is no such tensor.
            ValueError: The box is not within the tensor.
            CorruptError: A byte differs from what was saved.
        """
        dtype, shape = self.entry(name, group)
        shape = shape if box is None else [length for _, length in box]
        array = np.empty(shape, np.dtype(_NUMPY[dtype]))
        spans = None if box is None else [[start, length] for start, length in box]
        self.read_into([(name, group, spans, array.reshape(-1).view(np.uint8))])
        return array

    def read_into(
        self,
        wants: Sequence[tuple[str, str, list[list[int]] | None, np.ndarray[Any, Any]]],
        *,
        progress: OnProgress = False,
    ) -> int:
        """Reads many boxes at once, each into its memory, in the order of the files.

        Args:
            wants: Name, group, box (``[start, length]`` on each axis; ``None``: all of it), and
                the bytes to fill: an array of ``uint8`` of exactly the length of the box.
            progress: As for `feedline.check`.

        Returns:
            How many bytes of blocks were read and verified.
        """
        with _Line("read", progress) as line:
            return self._inner.read(wants, line.bytes if line.is_wanted else None)

    def blobs(self) -> list[str]:
        """The names of the blobs that were stored with the tensors."""
        return self._inner.blobs()

    def blob(self, name: str) -> bytes:
        """The bytes of a blob.

        Raises:
            KeyError: There is no blob of this name.
        """
        return self._inner.blob(name)


def ls(folder: Url) -> dict[str, Any]:
    """The steps of a folder, and orphaned files of interrupted saves.

    Returns:
        What ``feedline ckpt ls --json`` prints: ``folder``, ``newest``, ``steps`` and
        ``leftovers``, with units in the keys. A damaged step has its ``fault``.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    found: dict[str, Any] = json.loads(_feedline.ckpt_ls(text_of(folder)))
    return found


def verify(folder: Url, *, progress: OnProgress = None) -> dict[str, Any]:
    """Reads every byte of a step, or of all steps of a folder, and compares it with its checksum.

    Args:
        folder: The folder of steps, or of a step.
        progress: As for `feedline.check`.

    Returns:
        ``{"ok": bool, "steps": [...], "skipped": [...]}``: of each step ``ok``,
        ``verified_bytes`` and the ``fault``, which names the file and the byte. Damage raises no
        exception.

    Raises:
        FileNotFoundError: There is no such step.
    """
    with _Line("verify", progress) as line:
        found: dict[str, Any] = json.loads(_feedline.ckpt_verify(text_of(folder), line.bytes))
        return found


def diff(a: Url, b: Url, *, read: bool = False, progress: OnProgress = None) -> dict[str, Any]:
    """Compares two steps, tensor by tensor and blob by blob.

    Args:
        a: A step, or a folder of steps for its newest.
        b: The other one.
        read: Whether every byte is read. Otherwise tensors with equal checksums are equal.
        progress: As for `feedline.check`.

    Returns:
        What ``feedline ckpt diff --json`` prints: ``same``, and where and by how much each
        different tensor differs.

    Raises:
        FileNotFoundError: There is no such step.
    """
    with _Line("diff", progress) as line:
        text = _feedline.ckpt_diff(text_of(a), text_of(b), read, line.bytes)
        found: dict[str, Any] = json.loads(text)
        return found


def retain(
    folder: Url, keep_last: int, *, keep_every: int | None = None, drain_to: Url | None = None
) -> list[int]:
    """Deletes old steps: all but the newest complete ones, which are always at least one.

    Args:
        folder: The folder of steps.
        keep_last: How many of the newest steps are kept.
        keep_every: Steps that are a multiple of this are kept, too.
        drain_to: Steps that this second folder lacks are kept, too.

    Returns:
        The steps that were deleted.

    Raises:
        FileNotFoundError: There are no steps in this folder.
        ValueError: Both folders are the same.
    """
    target = None if drain_to is None else open_folder(drain_to)
    return open_folder(folder).retain(keep_last, keep_every, target)


def drain(source: Url, target: Url, *, progress: OnProgress = None) -> list[int]:
    """Copies all steps that a second folder lacks, each verified and atomically.

    An interrupted copy is resumed. Nothing is deleted; `retain` deletes old steps of either folder.

    Args:
        source: The folder of steps.
        target: The other folder, usually of another store: ``"s3://bucket/run"``.
        progress: As for `feedline.check`.

    Returns:
        The steps that were copied.

    Raises:
        CorruptError: A step is damaged; the others are copied.
        FeedlineError: The second folder has another step of the same number; the others are copied.
        FileNotFoundError: There are no steps to copy.
        OSError: A store failed, or is full (``ENOSPC``); this ends the copies.
        ValueError: Both folders are the same.

    An exception of a step has a note with all steps that were not copied.
    """
    with _Line("drain", progress) as line:
        return open_folder(source).drain(open_folder(target), line.bytes)
