"""Saves of three ranks of which one is killed: ``python dcp_kills.py FOLDER MOMENTS``.

The ranks are forks of this program. After each kill the other ranks must exit within ten seconds,
and the newest step must be complete: the previous one, or the one that was being saved. Prints the
longest time in which the others exited.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from feedline import ckpt
from feedline.dcp import StorageReader, StorageWriter

RANKS = 3
SECONDS_MAX = 10.0
FAILED, WRONG = 3, 4


def state_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """The state of a rank at a step: 24 MB of its own in a few tensors, and one shared tensor."""
    names = [f"{rank}.{number}" for number in range(12)] + ["all"]
    return {name: torch.full((500_000,), float(step), dtype=torch.float32) for name in names}


def run_rank(folder: Path, step: int, rank: int, kill_after: float | None) -> int:
    """One save of one rank, in its own process."""
    store = f"file://{folder}/store-{step}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    state = state_of(step, rank)
    dist.barrier()
    if kill_after is not None:
        timer = threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    start = time.monotonic()
    try:
        dcp.save(state, storage_writer=StorageWriter(folder / "ckpt", step))
    except (dcp.api.CheckpointException, RuntimeError):
        return FAILED
    if kill_after is not None:
        time.sleep(60)  # it was saved before the kill
    (folder / "seconds").write_text(str(time.monotonic() - start))
    return 0


def fork_rank(folder: Path, step: int, rank: int, kill_after: float | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = WRONG
    try:
        code = run_rank(folder, step, rank, kill_after)
    finally:
        os._exit(code)


def save(folder: Path, step: int, victim: int | None, after: float) -> float:
    """A save of all ranks; returns the seconds after the kill in which the others exited."""
    pids = {
        fork_rank(folder, step, rank, after if rank == victim else None): rank
        for rank in range(RANKS)
    }
    codes: dict[int, int] = {}
    killed_at = time.monotonic()
    ended_at = killed_at
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if rank == victim:
            killed_at = time.monotonic()
        ended_at = time.monotonic()
    if victim is None:
        assert set(codes.values()) == {0}, codes
        return 0.0
    assert codes.pop(victim) == -signal.SIGKILL, codes
    assert set(codes.values()) <= {0, FAILED}, codes
    return max(0.0, ended_at - killed_at)


def check(folder: Path, steps: set[int]) -> int:
    """Reads the newest step, which is one of these; returns its number."""
    reader = StorageReader(folder / "ckpt")
    assert reader.step in steps, (reader.step, steps)
    state = {name: torch.zeros(500_000) for rank in range(RANKS) for name in state_of(0, rank)}
    pid = os.fork()  # reading may start threads, which later forks would lack
    if pid == 0:
        code = WRONG
        try:
            dcp.load(state, storage_reader=StorageReader(folder / "ckpt"), no_dist=True)
            if all((tensor == reader.step).all() for tensor in state.values()):
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return reader.step


def main() -> None:
    folder, moments = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    save(folder, 0, None, 0.0)
    good = check(folder, {0})
    whole = float((folder / "seconds").read_text())
    longest, committed = 0.0, 0
    for moment in range(moments):
        step = moment + 1
        seconds = save(folder, step, moment % RANKS, whole * (moment + 0.5) / moments)
        assert seconds < SECONDS_MAX, (moment, seconds)
        longest = max(longest, seconds)
        newest = check(folder, {good, step})
        committed += newest == step
        good = newest
        ckpt.retain(folder / "ckpt", 1)
    print(f"{moments} kills, {committed} after the commit, others ended in {longest:.1f} s")


if __name__ == "__main__":
    main()
