"""Lightning's Trainer saves and restores objects with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from protocols import assert_known, parameters_of

import feedline
import feedline.torch

STEPS = 12


class Model(lightning.LightningModule):
    """A tiny language model, which records its batches and losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(50257, 8), torch.nn.Linear(8, 50257, bias=False)
        )
        self.seen: list[torch.Tensor] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen.append(batch["tokens"].clone())
        logits = self.layers(batch["tokens"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(lightning.LightningDataModule):
    def __init__(self, corpus: str) -> None:
        super().__init__()
        self.corpus = corpus

    def train_dataloader(self) -> feedline.torch.Loader:
        samples = feedline.open(self.corpus, sequence_length=32, num_samples=48, cache=False)
        return feedline.torch.Loader(samples, micro_batch_size=4)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )


def fit(
    fitted: lightning.Trainer, corpus: str, checkpoint: Path | None = None
) -> tuple[Model, lightning.Trainer]:
    model = Model()
    with warnings.catch_warnings():
        # Lightning warns that there are no workers.
        warnings.simplefilter("ignore")
        fitted.fit(model, datamodule=Data(corpus), ckpt_path=checkpoint, weights_only=False)
    return model, fitted


def state_of(checkpoint: Path) -> dict[str, Any]:
    found = torch.load(checkpoint, weights_only=False)
    loader: dict[str, Any] = found["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    return loader


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A run that was not interrupted, and the folder of its checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("lightning")
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    model, _ = fit(trainer(folder, callbacks=[saved], enable_checkpointing=True), corpus)
    return model, folder


def tokens_of(corpus: str) -> torch.Tensor:
    samples = feedline.open(corpus, sequence_length=32, num_samples=48, cache=False)
    return torch.from_numpy(samples.read(range(48))["tokens"]).view(STEPS, 4, 32)


def test_a_fit_sees_every_batch_once(corpus: str, whole: tuple[Model, Path]) -> None:
    assert torch.equal(torch.stack(whole[0].seen), tokens_of(corpus))


@pytest.mark.parametrize("step", [5, 10])
def test_a_resumed_fit_equals_an_uninterrupted_one(
    corpus: str, tmp_path: Path, whole: tuple[Model, Path], step: int
) -> None:
    model, folder = whole
    checkpoint = folder / f"step={step}.ckpt"
    # Not one batch ahead, because the loader has a length.
    assert state_of(checkpoint)["samples_consumed"] == step * 4
    rest, _ = fit(trainer(tmp_path), corpus, checkpoint)
    assert torch.equal(torch.stack(rest.seen), tokens_of(corpus)[step:])
    assert rest.losses == model.losses[step:]
    for ours, theirs in zip(rest.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_fit_that_was_stopped_can_be_extended(corpus: str, tmp_path: Path) -> None:
    first, fitted = fit(trainer(tmp_path, max_epochs=-1, max_steps=7), corpus)
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    assert state_of(tmp_path / "last.ckpt")["samples_consumed"] == 28
    longer = trainer(tmp_path, max_epochs=-1, max_steps=STEPS)
    rest, _ = fit(longer, corpus, tmp_path / "last.ckpt")
    assert torch.equal(torch.stack(first.seen + rest.seen), tokens_of(corpus))


def test_lightning_has_the_names_that_are_relied_on() -> None:
    methods = {name for name in vars(_Stateful) if not name.startswith("_")}
    assert_known(methods, ["load_state_dict", "state_dict"], "_Stateful")
    states = {name for name in dir(CombinedLoader) if "state_dict" in name}
    assert_known(states, ["_load_state_dicts", "_state_dicts"], "CombinedLoader")
    fetcher = parameters_of(_PrefetchDataFetcher)
    assert_known(fetcher, ["prefetch_batches"], "_PrefetchDataFetcher")
