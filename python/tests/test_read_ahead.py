"""Samples by number are read ahead, and a forked process may free batches."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np

import feedline

# Much longer than a process needs to free 500 arrays.
CHILD_SECONDS_MAX = 30


def test_equal_strides_are_read_ahead(corpus: str) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=2000, cache=False)
    for first in range(1, 2000, 3):
        dataset.read([first])
    assert dataset._core.hits == 665


def test_strides_that_do_not_last_start_few_loaders(corpus: str) -> None:
    """Megatron's blends read a corpus with such strides. Each useless loader costs milliseconds."""
    dataset = feedline.open(corpus, sequence_length=32, num_samples=2000, cache=False)
    places = list(itertools.accumulate(itertools.islice(itertools.cycle([1, 1, 2]), 1200)))
    found = np.concatenate([dataset.read([place])["tokens"] for place in places])
    assert np.array_equal(found, dataset.read(places)["tokens"])
    assert dataset._core.hits <= 8


def test_a_forked_process_frees_the_batches_of_its_parent(corpus: str) -> None:
    """At the fork a thread of the parent may hold the lock of the memory to which batches return;
    in the child that lock is never released."""
    dataset = feedline.open(corpus, sequence_length=32, num_samples=1_000_000, cache=False)
    loader = feedline.Loader(dataset, micro_batch_size=1)
    kept = [next(loader) for _ in range(500)]
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            next(loader)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(100):
            child = os.fork()
            if child == 0:
                kept.clear()
                os._exit(0)
            assert _ends(child)
    finally:
        is_over.set()
        reader.join()
        loader.close()


def _ends(child: int) -> bool:
    deadline = time.monotonic() + CHILD_SECONDS_MAX
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
