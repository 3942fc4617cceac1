"""PyTorch's DataLoader over samples by number, and batches as tensors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import feedline
import feedline.torch


@pytest.fixture(scope="module")
def dataset(corpus: str) -> feedline.Dataset:
    return feedline.open(corpus, sequence_length=32, num_samples=400, cache=False)


def expected(dataset: feedline.Dataset, name: str) -> torch.Tensor:
    """All samples, of the shape [400, 32], by single reads."""
    return torch.stack([torch.from_numpy(dataset[index][name]) for index in range(400)])


def joined(batches: object, name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in batches])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask", "position_ids"])
def test_sequential_batches_are_the_samples(dataset: feedline.Dataset, name: str) -> None:
    loader = DataLoader(feedline.torch.MapDataset(dataset), batch_size=8)
    found = joined(loader, name)
    assert torch.equal(found, expected(dataset, name))
    assert found.dtype == (torch.float32 if name == "loss_mask" else torch.int64)


def test_a_sequential_sampler_finds_its_samples_read_ahead(corpus: str) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=400, cache=False)
    batches = list(DataLoader(feedline.torch.MapDataset(dataset), batch_size=8))
    # Two calls reveal the stride.
    assert len(batches) == 50 and dataset._core.hits == 48


def test_a_sampler_of_a_rank_finds_its_samples_read_ahead(corpus: str) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=400, cache=False)
    second_of_three = [list(range(first + 4, first + 8)) for first in range(0, 384, 12)]
    loader = DataLoader(feedline.torch.MapDataset(dataset), batch_sampler=second_of_three)
    assert len(list(loader)) == 32 and dataset._core.hits == 30


def test_a_shuffled_sampler_reads_the_same_samples(dataset: feedline.Dataset) -> None:
    indices = torch.randperm(400, generator=torch.Generator().manual_seed(1)).tolist()
    loader = DataLoader(feedline.torch.MapDataset(dataset), batch_size=8, sampler=indices)
    assert torch.equal(joined(loader, "tokens"), expected(dataset, "tokens")[indices])


def test_a_subset_reads_batches(dataset: feedline.Dataset) -> None:
    subset = Subset(feedline.torch.MapDataset(dataset), range(100, 200))
    found = joined(DataLoader(subset, batch_size=10), "tokens")
    assert torch.equal(found, expected(dataset, "tokens")[100:200])


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_read_the_same_samples(
    dataset: feedline.Dataset, context: str, workers: int
) -> None:
    dataset.read([0])  # the parent has threads and open files
    loader = DataLoader(
        feedline.torch.MapDataset(dataset),
        batch_size=8,
        num_workers=workers,
        multiprocessing_context=context,
    )
    assert torch.equal(joined(loader, "tokens"), expected(dataset, "tokens"))


def test_a_loader_in_two_workers_is_refused_by_name(dataset: feedline.Dataset) -> None:
    loader = DataLoader(
        feedline.torch.Loader(dataset, micro_batch_size=4), batch_size=None, num_workers=2
    )
    with pytest.raises(ValueError, match="one stream in 2 workers: expected num_workers=0"):
        next(iter(loader))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_loader_in_one_worker_continues(dataset: feedline.Dataset, context: str) -> None:
    source = feedline.torch.Loader(dataset, micro_batch_size=4)
    head = [next(source)["tokens"].clone() for _ in range(3)]
    worker = DataLoader(
        source, batch_size=None, num_workers=1, multiprocessing_context=context
    )
    found = torch.cat([*head, joined(worker, "tokens")])
    assert torch.equal(found, expected(dataset, "tokens"))


def test_a_loader_returns_full_batches_of_its_rank(dataset: feedline.Dataset) -> None:
    tokens = expected(dataset, "tokens")[:396].view(33, 3, 4, 32)
    for rank in range(3):
        loader = feedline.torch.Loader(
            dataset, micro_batch_size=4, data_parallel_rank=rank, data_parallel_size=3
        )
        assert len(loader) == 33
        assert torch.equal(torch.stack([b["tokens"] for b in loader]), tokens[:, rank])
        assert loader.samples_consumed == 396


def test_a_pickled_loader_continues_where_it_was(dataset: feedline.Dataset) -> None:
    loader = feedline.torch.Loader(dataset, micro_batch_size=4)
    next(loader)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.samples_consumed == 4
    assert torch.equal(next(copy)["tokens"], next(loader)["tokens"])


def test_changing_a_batch_does_not_affect_later_ones(dataset: feedline.Dataset) -> None:
    loader = feedline.torch.Loader(dataset, micro_batch_size=4)
    for batch in loader:
        assert int(batch["loss_mask"].sum()) == 128
        for name in ("tokens", "labels", "loss_mask"):
            batch[name].fill_(7)


def test_kept_batches_are_not_overwritten(dataset: feedline.Dataset) -> None:
    batches = list(feedline.torch.Loader(dataset, micro_batch_size=4))
    assert torch.equal(joined(batches, "tokens"), expected(dataset, "tokens"))


def test_a_state_of_other_data_is_refused(corpora: tuple[str, str]) -> None:
    ours, theirs = (
        feedline.torch.Loader(
            feedline.open(corpus, sequence_length=32, num_samples=64, cache=False),
            micro_batch_size=4,
        )
        for corpus in corpora
    )
    with pytest.raises(feedline.OtherDataError, match="corpora"):
        ours.load_state_dict(theirs.state_dict())


def test_tensors_share_the_memory_of_arrays() -> None:
    array = np.arange(6).reshape(2, 3)
    found = feedline.torch.tensors({"tokens": array})["tokens"]
    array[0, 0] = 9
    assert found[0, 0] == 9
