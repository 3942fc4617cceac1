"""torch.distributed.checkpoint in several processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import feedline
from feedline import ckpt
from feedline.dcp import StorageReader, StorageWriter

HERE = Path(__file__).parent

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def run_ranks(start: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """A function that runs all ranks of a verb of dcp_ranks.py and waits for them."""

    def run(verb: str, world: int, *more: object) -> None:
        store = tmp_path / f"store-{verb}-{world}"
        program = HERE / "dcp_ranks.py"
        ranks = [
            start(program, tmp_path / "ckpt", verb, rank, world, store, *more)
            for rank in range(world)
        ]
        for rank in ranks:
            rank.output()

    return run


def test_three_ranks_load_what_four_saved_with_other_placements(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    run_ranks("save", 4, 2000)
    assert ckpt.verify(tmp_path / "ckpt")["ok"]
    run_ranks("load", 3, 2000)


def test_sharded_tensors_in_the_background(
    run_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The processes that DCP starts connect by TCP.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    run_ranks("sharded", 2)


def test_tensors_of_every_protocol_are_saved_in_pieces(
    run_ranks: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies for background saves had lost what describes them: a shard was saved as the whole.
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    run_ranks("pieces", 2)
    run_ranks("load-pieces", 3)
    state = {"list": [{"uneven": torch.zeros(11, 6)}], "model": {"rows": torch.zeros(11, 6)}}
    for step in range(3):
        dcp.load(state, storage_reader=StorageReader(tmp_path / "ckpt", step))
        expected = torch.arange(66.0).view(11, 6) + step
        assert torch.equal(state["list"][0]["uneven"], expected)
        assert torch.equal(state["model"]["rows"], expected)
    assert ckpt.verify(tmp_path / "ckpt")["ok"]


def test_cached_plans_after_failed_saves(run_ranks: Callable[..., None]) -> None:
    run_ranks("cached", 3)


def test_a_rank_that_cannot_save_ends_the_others(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    run_ranks("refused", 3)
    assert ckpt.verify(tmp_path / "ckpt")["ok"]  # the step that was saved in the end


def test_after_a_kill_at_any_moment_the_last_step_loads(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    output = start("-W", "ignore", HERE / "dcp_kills.py", tmp_path, 25).output()
    found = re.fullmatch(r"25 kills, (\d+) after the commit, others ended in .* s\n", output)
    assert found, output


def test_two_runs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    code = "import feedline._feedline as f; print(f.process_identity(), flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    try:
        (tmp_path / f".lease-{other.stdout.readline().strip()}").touch()
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, 1))
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, feedline.FolderHeldError) and str(other.pid) in str(error)
    finally:
        other.communicate("", timeout=30)
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, 1))


def test_a_full_disk_is_detected_before_writing(tmp_path: Path) -> None:
    # One byte of memory; its copy would have 1 EiB.
    state = {"w": torch.zeros(1, dtype=torch.uint8).expand(1 << 60)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt", 1))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, OSError) and error.errno == 28, error
    assert [path.name for path in (tmp_path / "ckpt").rglob("*.safetensors")] == []
