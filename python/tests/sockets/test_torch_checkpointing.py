"""The storage of torch_checkpointing's manager."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import slow_checkpoint
import torch
from torch_checkpointing import (
    CheckpointManager,
    ItemSpec,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    SafetensorsSerialization,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.base_storage import ReadArgs

from feedline.torch_checkpointing import DurableStorage, StorageConfig

ODD = 1001
"""Elements of a tensor whose length is no multiple of a block, which direct I/O needs."""


def manager_of(**config: Any) -> CheckpointManager:
    config = {"save": SyncCheckpointSaverConfig(), **config}
    return CheckpointManager.Config(storage_config=StorageConfig(), **config).build()


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(ODD) + float(step), "b": torch.ones(3)}, "step": step}


def files_of(folder: Path) -> list[str]:
    """Every file, hidden ones too."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    )


def check(manager: CheckpointManager, folder: Path, step: int) -> None:
    """Loads a checkpoint into a state and compares it."""
    into = {"model": {"w": torch.zeros(ODD), "b": torch.zeros(3)}, "step": 0}
    found = manager.load(folder, into=into)
    assert found["step"] == step
    for name, tensor in state_of(step)["model"].items():
        assert torch.equal(found["model"][name], tensor)


def test_a_checkpoint_is_loaded_as_saved(tmp_path: Path) -> None:
    manager = manager_of()
    for step in (1, 2):
        manager.save(f"{tmp_path}/step-{step}", state_of(step))
    for step in (1, 2):
        check(manager, tmp_path / f"step-{step}", step)
    assert files_of(tmp_path / "step-1") == ["model_0.pt", "step_0.pt"]
    manager.close()


def test_a_checkpoint_is_saved_in_the_background(tmp_path: Path) -> None:
    manager = CheckpointManager.Config(storage_config=StorageConfig()).build()
    saved = manager.save(f"{tmp_path}/step-1", state_of(1))
    assert saved is not None
    saved.result(120)
    check(manager, tmp_path / "step-1", 1)
    manager.close()


def test_other_layouts_are_loaded_as_saved(tmp_path: Path) -> None:
    items = {
        "model": ItemSpec(
            layout=LayoutInfo("model.safetensors", SafetensorsSerialization()),
            resharder=DefaultResharder(),
        ),
        "step": ItemSpec(layout=LayoutInfo("about/step.json", JsonSerialization())),
    }
    manager = manager_of(items=items)
    manager.save(f"{tmp_path}/step-1", state_of(1))
    check(manager, tmp_path / "step-1", 1)
    weights = safetensors.torch.load_file(tmp_path / "step-1/model.safetensors")
    assert torch.equal(weights["w"], state_of(1)["model"]["w"])
    manager.close()


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    manager = manager_of()
    manager.save(f"{tmp_path}/step-1", state_of(1))
    with pytest.raises(FileExistsError, match="expected no .*step-1 or an empty folder"):
        manager.save(f"{tmp_path}/step-1", state_of(2))
    check(manager, tmp_path / "step-1", 1)
    # The caller may delete it.
    DurableStorage().rmdir(tmp_path / "step-1")
    manager.save(f"{tmp_path}/step-1", state_of(3))
    check(manager, tmp_path / "step-1", 3)
    assert os.listdir(tmp_path) == ["step-1"]
    manager.close()


def test_a_killed_save_leaves_no_file_under_its_name(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    program = start(slow_checkpoint.__file__, tmp_path / "step-1")
    program.wait_for("paused")
    program.kill()
    assert os.listdir(tmp_path) == ["tmp_step-1"]
    leftovers = files_of(tmp_path / "tmp_step-1")
    assert len(leftovers) == 2 and leftovers[0].startswith(".other_0.pt.feedline-")
    assert leftovers[1] == "model_0.pt"
    storage = DurableStorage()
    assert storage.ls(tmp_path / "tmp_step-1") == ["model_0.pt"]
    # The package retries in the same folder, from which the rename removes leftovers.
    manager = manager_of()
    manager.save(f"{tmp_path}/step-1", state_of(1))
    check(manager, tmp_path / "step-1", 1)
    assert files_of(tmp_path) == ["step-1/model_0.pt", "step-1/step_0.pt"]
    manager.close()


def test_a_save_that_fails_leaves_no_file_under_its_name(tmp_path: Path) -> None:
    manager = manager_of()
    state = {"model": {"w": torch.ones(ODD), "bad": lambda: None}}
    # pickle of Python 3.11 and of 3.13 name the function in different sentences.
    with pytest.raises(Exception, match=r"local object .*<locals>\.<lambda>"):
        manager.save(f"{tmp_path}/step-1", state)
    assert files_of(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        manager.load(f"{tmp_path}/step-1", into=state_of(0))
    manager.close()


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    storage, path = DurableStorage(), tmp_path / "file"
    storage.write(path, b"old")
    stream = storage.stream_write(path)
    stream.write(memoryview(b"new"))  # type: ignore[attr-defined]
    assert storage.ls(tmp_path) == ["file"] and storage.read(path) == b"old"
    stream.close()
    assert storage.read(path) == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()

    def raises() -> None:
        with storage.stream_write(path) as stream:
            stream.write(b"half")  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    def forgets() -> None:
        storage.stream_write(path).write(b"half")  # type: ignore[attr-defined]

    with pytest.raises(KeyboardInterrupt):
        raises()
    forgets()
    assert files_of(tmp_path) == ["file"] and path.read_bytes() == b"new"
    with pytest.raises(ValueError, match="the stream is closed"):
        stream.write(b"more")  # type: ignore[attr-defined]


def umask() -> int:
    """The umask of this process, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_full_file_system_leaves_the_old_file(tmp_path: Path) -> None:
    storage, path = DurableStorage(), tmp_path / "file"
    storage.write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        stream = storage.stream_write(path)
        with pytest.raises(OSError, match="too large"):
            stream.write(bytes(3 << 20))  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="too large"):
            stream.write(b"more")  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="too large"):
            stream.close()
        # A write that only fails when its buffer is flushed.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        with pytest.raises(OSError, match="too large"):
            storage.write(path, bytes(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(tmp_path) == ["file"] and path.read_bytes() == b"old"


class Calls:
    """Records calls of fsync and rename, in order, by the names of the files."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._fsync, self._rename = os.fsync, os.rename
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "rename", self.rename)

    def fsync(self, number: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
        self.seen.append(f"fsync {name.split('.feedline-')[0]}")
        self._fsync(number)

    def rename(self, source: Path, target: Path) -> None:
        self.seen.append(f"rename {target.name.split('.feedline-')[0]}")
        self._rename(source, target)


def test_all_operations_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, folder = DurableStorage(), tmp_path / "top"
    calls = Calls(monkeypatch)
    storage.mkdir(folder / "a/b")
    storage.mkdir(folder / "a/b")
    storage.mkdir(folder / "a/c", recursive=False)
    assert calls.seen == [f"fsync {tmp_path.name}", "fsync top", "fsync a", "fsync a"]
    calls.seen.clear()
    storage.write(folder / "a/b/file", b"x")
    assert calls.seen == ["fsync .file", "rename file", "fsync b"]
    calls.seen.clear()
    storage.rename(folder / "a/b", folder / "b", is_directory=True)
    assert calls.seen == ["rename b", "fsync top", "fsync a"]
    calls.seen.clear()
    storage.delete(folder / "b/file")
    storage.rmdir(folder / "b")
    assert calls.seen == ["fsync b", "rename .b", "fsync top", "fsync top"]
    assert storage.ls(folder) == ["a"]


def test_a_failed_fsync_is_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        DurableStorage().write(tmp_path / "file", b"x")
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("full", "none", None),
        ("full", "empty", None),
        ("full", "other", "found a folder with contents"),
        ("full", "file", "found a file"),
        ("file", "none", None),
        ("file", "second", None),
        ("file", "empty", "found a folder"),
        ("file", "full", "found a folder"),
    ],
)
def test_renames_match_the_package(
    tmp_path: Path, source: str, target: str, text: str | None
) -> None:
    for name in ("full", "empty", "other"):
        (tmp_path / name).mkdir()
    for name in ("full/one", "full/.two.feedline-0123456789abcdef", "other/one", "file", "second"):
        (tmp_path / name).write_text(name)
    before = files_of(tmp_path)
    storage, is_directory = DurableStorage(), source == "full"
    if text is None:
        storage.rename(tmp_path / source, tmp_path / target, is_directory=is_directory)
        assert not (tmp_path / source).exists()
        found = tmp_path / target / "one" if is_directory else tmp_path / target
        assert found.read_text() == ("full/one" if is_directory else "file")
        assert storage.ls(tmp_path / target) == ["one"] if is_directory else True
        return
    with pytest.raises(FileExistsError, match=text):
        storage.rename(tmp_path / source, tmp_path / target, is_directory=is_directory)
    after = [name for name in before if "feedline" not in name or source != "full"]
    assert files_of(tmp_path) == after


def test_a_stream_is_read_at_any_offset(tmp_path: Path) -> None:
    storage, path = DurableStorage(), tmp_path / "file"
    storage.write(path, bytes(range(256)) * 33)
    assert storage.getsize(path) == 8448 and storage.exists(path) and not storage.isdir(path)
    with storage.stream_read(path, ReadArgs(pre_read_full_file=False, direct_io=True)) as stream:
        stream.seek(4097)
        into = bytearray(3)
        assert stream.readinto(into) == 3 and into == b"\1\2\3"


def test_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manager = manager_of()
    for url in ("s3://bucket/step-1", "gs://bucket/step-1", "file:///tmp/step-1"):
        with pytest.raises(ValueError, match="expected a path of a file system, found a URL"):
            manager.save(url, state_of(1))
        with pytest.raises(ValueError, match="feedline.dcp.StorageWriter"):
            manager.load(url, into=state_of(1))
    assert os.listdir(tmp_path) == []
    with pytest.raises(NotADirectoryError, match="expected a folder"):
        (tmp_path / "file").touch()
        DurableStorage().rmdir(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        DurableStorage().rmdir(tmp_path / "none")
    manager.close()
