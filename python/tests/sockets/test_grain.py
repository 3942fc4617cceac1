"""Grain's iterators."""

from __future__ import annotations

import itertools
import json
import sys
from types import ModuleType, SimpleNamespace

import grain.python as grain
import numpy as np
import pytest
from protocols import assert_known

import feedline
import feedline.grain


@pytest.fixture(scope="module")
def dataset(corpus: str) -> feedline.Dataset:
    return feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)


def test_an_element_is_a_whole_batch(dataset: feedline.Dataset) -> None:
    batches = feedline.grain.Batches(dataset, micro_batch_size=4)
    tokens = np.stack([batch["tokens"] for batch in batches])
    assert np.array_equal(tokens, dataset.read(range(200))["tokens"].reshape(50, 4, 32))


def test_a_state_continues_the_stream(dataset: feedline.Dataset) -> None:
    whole = np.stack([b["tokens"] for b in feedline.grain.Batches(dataset, micro_batch_size=4)])
    found = []
    state = None
    for stop in (3, 4, 31, 50):
        iterator = iter(feedline.grain.Batches(dataset, micro_batch_size=4))
        if state is not None:
            iterator.set_state(json.loads(state))
        while len(found) < stop:
            found.append(next(iterator)["tokens"].copy())
        state = json.dumps(iterator.get_state())
    assert np.array_equal(np.stack(found), whole)


def test_a_state_of_two_ranks_continues_in_one(dataset: feedline.Dataset) -> None:
    for rank in range(2):
        options = {"data_parallel_rank": rank, "data_parallel_size": 2}
        iterator = iter(feedline.grain.Batches(dataset, micro_batch_size=4, **options))
        for _ in range(5):
            next(iterator)
    one = iter(feedline.grain.Batches(dataset, micro_batch_size=4))
    one.set_state(iterator.get_state())
    assert np.array_equal(next(one)["tokens"], dataset.read(range(40, 44))["tokens"])


def test_each_loop_starts_at_the_first_batch(dataset: feedline.Dataset) -> None:
    batches = feedline.grain.Batches(dataset, micro_batch_size=4)
    whole = dataset.read(range(200))["tokens"]
    for count in (2, 2, 50, 50):
        tokens = [batch["tokens"] for batch in itertools.islice(batches, count)]
        assert np.array_equal(np.concatenate(tokens), whole[: count * 4])


def test_several_processes_of_jax_without_ranks_are_refused(
    dataset: feedline.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the two functions of JAX that are called; the pinned packages have no JAX."""
    jax = ModuleType("jax")
    is_initialized = True
    jax.distributed = SimpleNamespace(is_initialized=lambda: is_initialized)  # type: ignore[attr-defined]
    jax.process_count = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    with pytest.raises(ValueError, match=r"found 2 processes of JAX \(hint: jax.process_index"):
        next(iter(feedline.grain.Batches(dataset, micro_batch_size=4)))
    ranks = {"data_parallel_rank": 1, "data_parallel_size": 2}
    second = next(iter(feedline.grain.Batches(dataset, micro_batch_size=4, **ranks)))
    assert np.array_equal(second["tokens"], dataset.read(range(4, 8))["tokens"])
    is_initialized = False
    first = next(iter(feedline.grain.Batches(dataset, micro_batch_size=4)))
    assert np.array_equal(first["tokens"], dataset.read(range(4))["tokens"])


def test_workers_of_grain_are_refused(dataset: feedline.Dataset) -> None:
    """Each would return every batch."""
    options = grain.MultiprocessingOptions(num_workers=2)
    batches = feedline.grain.Batches(dataset, micro_batch_size=4).mp_prefetch(options)
    with pytest.raises(ValueError, match="Cannot slice .*feedline.grain.Batches"):
        next(iter(batches))


def test_transformations_keep_the_state(dataset: feedline.Dataset) -> None:
    def labels(batch: dict[str, np.ndarray]) -> np.ndarray:  # type: ignore[type-arg]
        return batch["labels"]

    mapped = feedline.grain.Batches(dataset, micro_batch_size=4).map(labels)
    iterator = iter(mapped)
    for _ in range(3):
        next(iterator)
    state = iterator.get_state()
    expected = next(iterator)
    again = iter(mapped)
    again.set_state(state)
    assert np.array_equal(next(again), expected)


def test_samples_by_number_are_a_data_source(dataset: feedline.Dataset) -> None:
    assert isinstance(dataset, grain.RandomAccessDataSource)
    batches = grain.MapDataset.source(dataset).to_iter_dataset().batch(4)
    iterator = iter(batches)
    tokens = [next(iterator)["tokens"] for _ in range(10)]
    state = iterator.get_state()
    again = iter(batches)
    again.set_state(state)
    tokens += [batch["tokens"] for batch in again]
    assert np.array_equal(np.concatenate(tokens), dataset.read(range(200))["tokens"])


def test_the_classic_loader_resumes_in_another_process_of_the_same_corpus(
    corpus: str, dataset: feedline.Dataset
) -> None:
    def loader(source: feedline.Dataset) -> grain.DataLoader:
        sampler = grain.IndexSampler(
            200, shard_options=grain.NoSharding(), shuffle=False, num_epochs=1, seed=0
        )
        return grain.DataLoader(
            data_source=source, sampler=sampler, operations=[grain.Batch(4)], worker_count=0
        )

    iterator = iter(loader(dataset))
    next(iterator)
    state = iterator.get_state()
    expected = next(iterator)["tokens"]
    reopened = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    again = iter(loader(reopened))
    again.set_state(state)
    assert np.array_equal(next(again)["tokens"], expected)
    other = feedline.open(corpus, sequence_length=32, num_samples=201, cache=False)
    with pytest.raises(ValueError, match="num_samples=201"):
        iter(loader(other)).set_state(state)


def test_grain_has_the_names_that_are_implemented() -> None:
    iterator = ["__next__", "get_state", "set_state"]
    assert_known(grain.DatasetIterator.__abstractmethods__, iterator, "DatasetIterator")
    assert_known(grain.IterDataset.__abstractmethods__, ["__iter__"], "IterDataset")
    source = {name for name in vars(grain.RandomAccessDataSource) if name in dir(list)}
    source -= set(dir(object))
    assert_known(source, ["__getitem__", "__len__"], "RandomAccessDataSource")
    public = {name for name in dir(grain.DatasetIterator) if not name.startswith("_")}
    known = ["close", "get_state", "load", "save", "set_state", "start_prefetch"]
    assert_known(public, known, "DatasetIterator")
