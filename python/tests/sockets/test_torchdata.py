"""torchdata's StatefulDataLoader."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from protocols import assert_known
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful import Stateful

import feedline
import feedline.torch


def make(corpus: str, workers: int) -> StatefulDataLoader:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    source = feedline.torch.Loader(dataset, micro_batch_size=4)
    return StatefulDataLoader(source, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_stream_equals_an_uninterrupted_one(corpus: str, workers: int) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    whole = torch.from_numpy(dataset.read(range(200))["tokens"]).view(50, 4, 32)
    found: list[torch.Tensor] = []
    state = None
    for batches in (1, 7, 30, 50):
        loader = make(corpus, workers)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            found.append(batch["tokens"].clone())
            if len(found) == batches:
                break
        state = loader.state_dict()
        if workers == 0:
            state = json.loads(json.dumps(state))
    assert torch.equal(torch.stack(found), whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_loop_is_a_new_epoch(corpus: str, workers: int) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    whole = torch.from_numpy(dataset.read(range(200))["tokens"])
    loader = make(corpus, workers)
    for _ in range(2):
        assert torch.equal(torch.cat([batch["tokens"] for batch in loader]), whole)
    # A state of the end of an epoch is the start of the next one.
    again = make(corpus, workers)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(torch.cat([batch["tokens"] for batch in again]), whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluations_see_the_same_batches(corpus: str, workers: int) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    batches = feedline.torch.Batches(dataset, micro_batch_size=4)
    whole = torch.from_numpy(dataset.read(range(8))["tokens"])
    for _ in range(2):
        loader = StatefulDataLoader(batches, batch_size=None, num_workers=workers)
        found = [batch["tokens"] for batch in itertools.islice(loader, 2)]
        assert torch.equal(torch.cat(found), whole)


def test_two_workers_are_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match="expected num_workers=0"):
        next(iter(make(corpus, 2)))


def test_samples_by_number_resume(corpus: str) -> None:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=200, cache=False)
    samples = feedline.torch.MapDataset(dataset)
    whole = [batch["tokens"] for batch in StatefulDataLoader(samples, batch_size=4)]
    first = StatefulDataLoader(samples, batch_size=4)
    batches = iter(first)
    for _ in range(20):
        next(batches)
    second = StatefulDataLoader(samples, batch_size=4)
    second.load_state_dict(first.state_dict())
    rest = [batch["tokens"] for batch in second]
    assert torch.equal(torch.stack(rest), torch.stack(whole[20:]))


def test_torchdata_has_the_names_that_are_implemented() -> None:
    methods = {name for name in vars(Stateful) if not name.startswith("_")}
    assert_known(methods, ["load_state_dict", "state_dict"], "Stateful")
