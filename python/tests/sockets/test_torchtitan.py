"""torchtitan's data loader. Its trainer 0.3.0 needs a newer PyTorch and is not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

import feedline
import feedline.torchtitan


class Tokenizer(BaseTokenizer):
    """GPT-2's tokenizer, of which the loader only needs the EOD id."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 50256

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 50257


def build(corpus: str, rank: int, ranks: int, **config: Any) -> BaseDataLoader:
    """Builds the loader as torchtitan's trainer does."""
    settings = feedline.torchtitan.DataLoader.Config(
        dataset_path=corpus, num_samples=240, **config
    )
    loader: BaseDataLoader = settings.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=Tokenizer(),
        seq_len=32,
        local_batch_size=4,
        snapshot_every_n_steps=10,
    )
    return loader


@pytest.fixture(scope="module")
def tokens(corpus: str) -> torch.Tensor:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=240)
    return torch.from_numpy(dataset.read(range(240))["tokens"])


def test_items_are_inputs_and_labels(corpus: str, tokens: torch.Tensor) -> None:
    loader = build(corpus, 1, 2)
    assert isinstance(loader, BaseDataLoader)
    items = list(loader)
    assert len(items) == 30
    for step, (inputs, labels) in enumerate(items):
        expected = tokens[step * 8 + 4 : step * 8 + 8]
        assert set(inputs) == {"input", "positions"}
        assert torch.equal(inputs["input"], expected)
        assert torch.equal(labels[:, :-1], expected[:, 1:])
        assert torch.equal(inputs["positions"], torch.arange(32).expand(4, -1))
        assert all(each.dtype == torch.int64 for each in (*inputs.values(), labels))


def test_two_ranks_resume_as_one(corpus: str, tokens: torch.Tensor, tmp_path: Path) -> None:
    loaders = [build(corpus, rank, 2) for rank in range(2)]
    for loader in loaders:
        items = iter(loader)
        for _ in range(5):
            next(items)
    assert loaders[0].state_dict() == loaders[1].state_dict()
    dcp.save({"dataloader": loaders[0]}, checkpoint_id=tmp_path, no_dist=True)
    one = build(corpus, 0, 1)
    dcp.load({"dataloader": one}, checkpoint_id=tmp_path, no_dist=True)
    rest = torch.cat([inputs["input"] for inputs, _ in one])
    assert torch.equal(rest, tokens[40:])


def test_an_empty_state_starts_at_the_first_sample(corpus: str, tokens: torch.Tensor) -> None:
    loader = build(corpus, 0, 1)
    loader.load_state_dict({})
    assert torch.equal(next(iter(loader))[0]["input"], tokens[:4])


def test_a_checkpoint_of_other_data_is_refused(corpora: tuple[str, str], tmp_path: Path) -> None:
    dcp.save({"dataloader": build(corpora[0], 0, 1)}, checkpoint_id=tmp_path, no_dist=True)
    other = build(corpora[1], 0, 1)
    with pytest.raises(feedline.OtherDataError, match="expected corpora"):
        dcp.load({"dataloader": other}, checkpoint_id=tmp_path, no_dist=True)


def test_documents_may_restart_positions(corpus: str) -> None:
    loader = build(corpus, 0, 1, reset_at_document=True)
    assert any((inputs["positions"][:, 1:] == 0).any() for inputs, _ in loader)


def test_labels_without_a_loss_are_ignored(corpus: str) -> None:
    loader = build(corpus, 0, 1, mask_eod_loss=True)
    assert any((labels == -100).any() for _, labels in loader)
    for inputs, labels in loader:
        assert ((labels == -100) == (inputs["input"] == 50256)).all()


def test_a_missing_dataset_path_is_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match="expected dataset_path"):
        build("", 0, 1)
