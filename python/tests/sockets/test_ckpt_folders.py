"""Copies of steps into a second folder, and calls of several threads on one folder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import feedline
from feedline import ckpt
from feedline.ckpt import open_folder
from feedline.dcp import StorageWriter


def save(folder: Path, *steps: int, **options: Any) -> None:
    for step in steps:
        state = {"w": torch.full((8,), float(step))}
        dcp.save(state, storage_writer=StorageWriter(folder, step, **options))


def steps_of(folder: Path) -> list[int]:
    return sorted(step["step"] for step in ckpt.ls(folder)["steps"])


def test_all_steps_are_copied_and_none_is_deleted(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, 1, 2, 3, 4, 5, 6)
    save(far, 100)
    assert sorted(ckpt.drain(near, far, progress=False)) == [1, 2, 3, 4, 5, 6]
    assert steps_of(far) == [1, 2, 3, 4, 5, 6, 100]
    assert ckpt.drain(near, far, progress=False) == []


def test_steps_that_were_not_copied_are_kept(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, 1, 2, 3, 4, 5, 6)
    save(far, 100)
    assert ckpt.retain(near, 1, drain_to=far) == []
    ckpt.drain(near, far, progress=False)
    save(near, 7)
    assert ckpt.retain(near, 1, drain_to=far) == [1, 2, 3, 4, 5, 6]
    assert steps_of(near) == [7]


def test_a_damaged_step_is_named_and_the_others_are_copied(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    save(near, 1, 2, 3)
    (file,) = (near / "step-000000000002").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(feedline.CorruptError) as caught:
        ckpt.drain(near, far, progress=False)
    assert caught.value.__notes__ == [f"steps that were not copied to {far}: 2"]
    assert steps_of(far) == [1, 3]


def test_wrong_folders_are_refused_and_not_created(tmp_path: Path) -> None:
    near, none = tmp_path / "near", tmp_path / "none"
    save(near, 1, 2)
    with pytest.raises(FileNotFoundError, match="none"):
        ckpt.drain(none, tmp_path / "far", progress=False)
    with pytest.raises(FileNotFoundError, match="none"):
        ckpt.retain(none, 1)
    with pytest.raises(ValueError, match="expected two folders, found one"):
        ckpt.drain(near, f"{near}/", progress=False)
    assert not none.exists()
    assert steps_of(near) == [1, 2]


def test_threads_change_a_folder_in_turn(tmp_path: Path) -> None:
    # Another spelling of the folder, and other options than those of the save.
    folder, failures, is_saving = f"{tmp_path}/.", [], True

    def retain() -> None:
        while is_saving:
            try:
                ckpt.retain(folder, 2)
            except Exception as failure:
                failures.append(failure)
                return

    save(tmp_path, 0)
    thread = threading.Thread(target=retain)
    thread.start()
    try:
        save(tmp_path, *range(1, 40), shard_bytes_max=1 << 20)
    finally:
        is_saving = False
        thread.join()
    assert failures == []


UNFINISHED = """
import pathlib, sys
from feedline import _feedline
from feedline.ckpt import open_folder
open_folder(sys.argv[1]).check_room(1, 1, 1)
name = f".tmp-step-000000000005-{_feedline.process_identity()}"
unfinished = pathlib.Path(sys.argv[1], name)
unfinished.mkdir()
(unfinished / "model.safetensors").write_bytes(bytes(4096))
"""


def test_room_is_made_by_deleting_unfinished_steps_of_dead_processes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", UNFINISHED, str(tmp_path)], check=True)
    assert list(tmp_path.glob(".tmp-step-*"))
    open_folder(tmp_path).check_room(6, 4096, 1)
    assert not list(tmp_path.glob(".tmp-step-*"))


def test_a_step_that_exists_is_refused_before_its_tensors_are_copied(tmp_path: Path) -> None:
    save(tmp_path, 1)
    # One byte of memory; its copy would have 1 EiB.
    state = {"w": torch.zeros(1, dtype=torch.uint8).expand(1 << 60)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(state, storage_writer=StorageWriter(tmp_path, 1))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, feedline.StepExistsError)
    assert steps_of(tmp_path) == [1]
