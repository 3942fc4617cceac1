"""Threads, descriptors and memory are released by `close` and by the garbage collector."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

import feedline

LOADERS = 1000


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def threads():
    return len(os.listdir("/proc/self/task"))


def resident_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def use(corpus, round_number):
    """A loader and a dataset that reads ahead; every third is left to the garbage collector."""
    dataset = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    loader = feedline.Loader(dataset, micro_batch_size=2, prefetch_bytes=1 << 20)
    batch = next(loader)
    for first in range(0, 8, 2):
        dataset.read(range(first, first + 2))
    if round_number % 3:
        loader.close()
        dataset.close()
    return batch


def test_loaders_release_threads_descriptors_and_memory(corpus):
    for round_number in range(100):
        use(corpus, round_number)
    gc.collect()
    before = descriptors(), threads(), resident_bytes()
    for round_number in range(LOADERS):
        use(corpus, round_number)
    gc.collect()
    after = descriptors(), threads(), resident_bytes()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] * 1.05


WAITS = """
import feedline, sys, time
class Slow:
    def __init__(self): self.first = True
print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def interrupted(call):
    """Exit code and output of a process that receives SIGINT while it waits in `call`."""
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(call=call)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
        return child.returncode, out
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def test_sigint_ends_preprocess(tmp_path):
    fifo = tmp_path / "endless.jsonl"
    os.mkfifo(fifo)
    holder = os.open(fifo, os.O_RDWR)  # a writer that never writes
    try:
        call = f"feedline.preprocess({str(fifo)!r}, {str(tmp_path / 'out')!r}, progress=False)"
        os.write(holder, b'{"text": "one line"}\n' * 10)
        code, out = interrupted(call)
    finally:
        os.close(holder)
    assert (code, out) == (0, "interrupted\n")


def test_a_loader_does_not_hold_the_gil(corpus):
    dataset = feedline.open(corpus, sequence_length=32, num_samples=2000)
    counted = []

    def count():
        loader = feedline.Loader(dataset, micro_batch_size=4)
        counted.append(sum(1 for _ in loader))

    each = [threading.Thread(target=count) for _ in range(4)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join(timeout=60)
    assert counted == [500] * 4


@pytest.mark.parametrize("late", ["loader", "dataset"])
def test_the_interpreter_exits_with_threads_running(corpus, late):
    text = f"""
import logging; logging.basicConfig(level=logging.DEBUG)
import feedline
dataset = feedline.open({corpus!r}, sequence_length=32, num_samples=2000)
loader = feedline.Loader(dataset, micro_batch_size=4)
next(loader)
[dataset.read([at, at + 1]) for at in range(0, 20, 2)]
"""
    run = subprocess.run([sys.executable, "-X", "dev", "-c", text], capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr.decode()


def test_importing_imports_no_framework():
    text = "import sys, feedline; print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True)
    assert out.stdout == "[]\n", out.stderr
