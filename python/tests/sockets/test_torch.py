"""PyTorch's DataLoader over samples by number, and batches as tensors."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loader_ranks
import numpy as np
import pytest
import torch
from protocols import assert_known
from torch.utils.data import ConcatDataset, DataLoader, Subset

import feedline
import feedline._ranks
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


@pytest.mark.parametrize("kind", ["plain", "late", "meshes"])
def test_ranks_of_a_process_group_read_other_samples(
    corpus: str, tmp_path: Path, start: Callable[..., Any], kind: str
) -> None:
    loader_ranks.check(start, corpus, tmp_path, kind)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_process_of_several_without_ranks_is_refused(
    dataset: feedline.Dataset, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "2")
    for use in (len, iter, next):
        for kind in (feedline.Loader, feedline.torch.Loader):
            with pytest.raises(ValueError, match=f"found {name}=2 and no process group .*pass both"):
                use(kind(dataset, micro_batch_size=4))
    ranks = {"data_parallel_rank": 0, "data_parallel_size": 1}
    assert len(feedline.torch.Loader(dataset, micro_batch_size=4, **ranks)) == 100
    monkeypatch.setenv(name, "1")
    assert len(feedline.torch.Loader(dataset, micro_batch_size=4)) == 100


def test_a_rank_without_a_size_is_refused(dataset: feedline.Dataset) -> None:
    for name in ("data_parallel_rank", "data_parallel_size"):
        with pytest.raises(ValueError, match="expected both or neither of data_parallel_rank"):
            feedline.torch.Loader(dataset, micro_batch_size=4, **{name: 1})


@pytest.mark.parametrize("kind", [feedline.Loader, feedline.torch.Loader])
def test_a_second_loop_starts_again(dataset: feedline.Dataset, kind: Any) -> None:
    loader = kind(dataset, micro_batch_size=4)
    head = [torch.as_tensor(batch["tokens"]) for batch in itertools.islice(loader, 3)]
    rest = [torch.as_tensor(batch["tokens"]) for batch in loader]
    assert torch.equal(torch.cat([*head, *rest]), expected(dataset, "tokens"))
    assert next(loader, None) is None and loader.samples_consumed == 400
    again = [torch.as_tensor(batch["tokens"]) for batch in loader]
    assert torch.equal(torch.cat(again), expected(dataset, "tokens"))


@pytest.mark.parametrize("kind", [feedline.Loader, feedline.torch.Loader])
def test_a_loaded_end_starts_again_with_a_warning(
    dataset: feedline.Dataset, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    caplog.set_level(logging.WARNING, "feedline.loader")
    ended = kind(dataset, micro_batch_size=4, samples_consumed=400)
    state = ended.state_dict()
    assert next(ended, None) is None
    for _ in range(2):
        for _ in kind(dataset, micro_batch_size=4):
            pass
    assert not caplog.records
    loader = kind(dataset, micro_batch_size=4)
    loader.load_state_dict(state)
    assert len(list(loader)) == 100
    assert "the end, after 400 of 400 samples" in caplog.text


def test_too_few_samples_for_a_batch_are_refused(corpus: str) -> None:
    few = feedline.open(corpus, sequence_length=32, num_samples=6, cache=False)
    loader = feedline.torch.Loader(
        few, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=2
    )
    with pytest.raises(ValueError, match="expected at least 8 samples, .* found 6"):
        iter(loader)


def test_evaluations_see_the_same_batches(dataset: feedline.Dataset) -> None:
    batches = feedline.torch.Batches(dataset, micro_batch_size=4)
    tokens = expected(dataset, "tokens")
    assert len(batches) == 100
    for source in (batches, DataLoader(batches, batch_size=None), pickle.loads(pickle.dumps(batches))):
        for count in (2, 2, 100, 100):
            found = joined(itertools.islice(source, count), "tokens")
            assert torch.equal(found, tokens[: count * 4])


def test_an_evaluation_that_would_continue_is_refused(dataset: feedline.Dataset) -> None:
    loader = feedline.torch.Loader(dataset, micro_batch_size=4)
    with torch.no_grad():
        head = joined(itertools.islice(loader, 2), "tokens")
        with pytest.raises(ValueError, match="cannot start an evaluation.*after sample 8 .*Batches"):
            iter(loader)
        # Inference that resumes at a state is no second evaluation.
        resumed = feedline.torch.Loader(dataset, micro_batch_size=4)
        resumed.load_state_dict(loader.state_dict())
        assert torch.equal(torch.cat([head, joined(resumed, "tokens")]), expected(dataset, "tokens"))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_state_of_a_loader_in_a_worker_is_refused(
    dataset: feedline.Dataset, context: str
) -> None:
    """The worker has the count; it reads ahead of the training loop."""
    loader = feedline.torch.Loader(dataset, micro_batch_size=4)
    state = loader.state_dict()
    worker = DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context=context)
    for _ in range(2):  # each loop starts where the loader of this process is
        found = joined(itertools.islice(worker, 3), "tokens")
        assert torch.equal(found, expected(dataset, "tokens")[:12])
    for use in (loader.state_dict, loader.save_state, lambda: loader.samples_consumed):
        with pytest.raises(ValueError, match="found a worker process that has read them"):
            use()
    loader.load_state_dict(state)
    assert loader.samples_consumed == 0


def test_items_of_documents_that_restart_are_stacked_by_any_caller(corpus: str) -> None:
    """Their offsets differ in length, so no item has them."""
    samples = feedline.open(
        corpus,
        sequence_length=32,
        num_samples=200,
        cache=False,
        reset_at_document=True,
        special={"eod": 50256},
    )
    items = feedline.torch.MapDataset(samples)
    assert set(items[0]) == set(items.__getitems__([0])[0]) == set(samples[0])
    offsets = samples.read(range(200))["cu_seqlens"]
    assert len(offsets) > 201  # some documents end within samples
    whole = torch.from_numpy(samples.read(range(200))["position_ids"])
    for source in (items, ConcatDataset([items]), samples):
        assert torch.equal(joined(DataLoader(source, batch_size=4), "position_ids"), whole)


def test_torch_has_the_names_that_are_relied_on() -> None:
    from torch.distributed import device_mesh, distributed_c10d
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    assert distributed_c10d._world.pg_map == {} and device_mesh.DeviceMesh
    found = {name for name in vars(_fsdp_common) if name.endswith("MeshInfo")}
    assert_known(found, feedline._ranks.DATA_MESHES, "mesh info")


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
