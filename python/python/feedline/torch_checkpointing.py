"""A durable storage for the package ``torch_checkpointing``.

>>> from torch_checkpointing import CheckpointManager
>>> from feedline.torch_checkpointing import StorageConfig
>>> manager = CheckpointManager.Config(storage_config=StorageConfig()).build()
>>> manager.save("run/ckpt/step-1000", {"model": model.state_dict()})

The package decides what a file contains and in which folder it is; this module writes it to disk. A
file appears under its name when all of it is durable, and so does a checkpoint. When a call
returns, its effect survives a power cut. The package's own storage fails on ext4 with ``EINVAL``,
because it uses direct I/O for lengths that are no multiple of a block.

Paths are those of a file system. `feedline.dcp` also saves to S3, with checksums.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch_checkpointing.storage import base_storage
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
)
from typing_extensions import Buffer

__all__ = ["DurableStorage", "StorageConfig"]

_BUFFER_BYTES = 1 << 20
"""Small writes are buffered: `torch.save` writes headers of tens of bytes for each tensor."""

_TEMPORARY = re.compile(r"\..+\.feedline-[0-9a-f]{16}")
"""Files being written, folders being deleted, and orphans of killed processes."""


@dataclass
class StorageConfig(base_storage.StorageConfig):
    """For ``CheckpointManager.Config(storage_config=...)``. It can be sent to another process."""

    def create_storage(self) -> DurableStorage:
        return DurableStorage()


class DurableStorage(LocalFileSystemStorage):
    """Files that are complete and durable under their names, or absent.

    Raises:
        ValueError: A path is a URL.
        FileExistsError: A rename would replace a folder with contents, or a folder a file.
        OSError: The file system failed or is full. An earlier file of the name is unchanged.
    """

    def __init__(self) -> None:
        super().__init__(LocalFileSystemStorageConfig(use_direct_io=False))

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        return super().stream_read(_local(path), read_args)

    def stream_write(self, path: Path) -> io.IOBase:
        """A stream to a file, which gets its name when it is closed and no write has failed."""
        return _WriteStream(_local(path))

    def write(self, path: Path, data: Buffer) -> None:
        with _WriteStream(_local(path)) as stream:
            stream.write(data)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        path = _local(path)
        if not recursive:
            os.mkdir(path)
            _sync_folder(path.parent)
            return
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            # Another rank may create the same folder.
            folder.mkdir(exist_ok=True)
            _sync_folder(folder.parent)

    def rmdir(self, path: Path) -> None:
        """Deletes a folder. It is renamed first, so that it is never visible in part."""
        path = _local(path)
        if path.is_symlink() or not path.is_dir():
            found = "a link or a file" if os.path.lexists(path) else "none"
            kind = errno.ENOTDIR if os.path.lexists(path) else errno.ENOENT
            raise OSError(kind, f"cannot delete: expected a folder, found {found}", str(path))
        hidden = _temporary(path)
        os.rename(path, hidden)
        _sync_folder(path.parent)
        shutil.rmtree(hidden)
        _sync_folder(path.parent)

    def delete(self, path: Path) -> None:
        path = _local(path)
        os.remove(path)
        _sync_folder(path.parent)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Commits a file or a folder, after removing orphans of killed writers from the folder."""
        source, target = _local(src_path), _local(dst_path)
        if source.is_dir():
            _remove_temporary(source)
        try:
            os.rename(source, target)
        except OSError as error:
            raise _rename_error(error, source, target) from error
        _sync_folder(target.parent)
        if source.parent != target.parent:
            _sync_folder(source.parent)

    def ls(self, path: Path) -> list[str]:
        """The names in a folder, sorted, without those of temporary files."""
        return sorted(name for name in os.listdir(_local(path)) if not _TEMPORARY.fullmatch(name))

    def exists(self, path: Path) -> bool:
        return super().exists(_local(path))

    def getsize(self, path: Path) -> int:
        return super().getsize(_local(path))

    def isdir(self, path: Path) -> bool:
        return super().isdir(_local(path))

    def remap_path(self, path: Path) -> str:
        return str(_local(path))


class _WriteStream(io.RawIOBase):
    """A file under a temporary name, which `close` makes durable and renames.

    If a write fails, if the block of a ``with`` raises, or if the stream is never closed, the file
    is removed and an earlier file of the name is unchanged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._temporary = _temporary(path)
        self._failure: OSError | None = None
        self._file: io.BufferedWriter | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        number = os.open(self._temporary, flags, 0o666)
        self._file = io.BufferedWriter(io.FileIO(number, "wb"), _BUFFER_BYTES)

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        if self._failure is not None:
            raise self._failure
        if self._file is None:
            raise ValueError(f"cannot write {self._path}: the stream is closed")
        with memoryview(data) as view:
            try:
                self._file.write(view)
            except OSError as error:
                self._failure = error
                raise
            return view.nbytes

    def flush(self) -> None:
        """Does nothing: `close` makes all bytes durable at once."""

    def close(self) -> None:
        if self._file is None:
            return
        try:
            if self._failure is not None:
                raise self._failure
            self._file.flush()
            os.fsync(self._file.fileno())
            os.rename(self._temporary, self._path)
            self._file.close()
            _sync_folder(self._path.parent)
        finally:
            self._abandon()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def __del__(self) -> None:
        # `__del__` of the base class would call `close`, which commits the file.
        if getattr(self, "_file", None) is not None:
            self._abandon()

    def _abandon(self) -> None:
        """Closes the file and removes it, unless it has its final name."""
        file, self._file = self._file, None
        if file is not None and not file.closed:
            # Not `file.close()`, which would write its buffer first, and fail as the write did.
            file.raw.close()
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
        super().close()


def _local(path: Path) -> Path:
    """The path, unless it is a URL: ``Path("s3://bucket/key")`` becomes ``s3:/bucket/key``."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text := os.fspath(path)):
        raise ValueError(
            f"cannot use {text}: expected a path of a file system, found a URL (hint: "
            "feedline.dcp.StorageWriter saves to S3)"
        )
    return Path(path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.feedline-{secrets.token_hex(8)}")


def _remove_temporary(folder: Path) -> None:
    for parent, folders, files in os.walk(folder):
        for name in files:
            if _TEMPORARY.fullmatch(name):
                os.unlink(os.path.join(parent, name))
        for name in [name for name in folders if _TEMPORARY.fullmatch(name)]:
            folders.remove(name)
            shutil.rmtree(os.path.join(parent, name))


def _rename_error(error: OSError, source: Path, target: Path) -> OSError:
    number = error.errno
    if number in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR) and target.exists():
        found = "a folder with contents" if target.is_dir() else "a file"
        text = f"expected no {target} or an empty folder, found {found} (hint: delete it first)"
        return FileExistsError(number, f"cannot rename {source}: {text}", str(target))
    if number == errno.EXDEV:
        text = "expected one file system, found two: a copy would not be atomic"
        return OSError(number, f"cannot rename {source} to {target}: {text}", str(target))
    return error


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
