"""Lightning's Trainer saves and restores objects with ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import loader_ranks
import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops import evaluation_loop, fit_loop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from protocols import assert_known, parameters_of
from torch.utils.data import DataLoader

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


class Scheduled(Model):
    """Reads the number of steps before states are loaded, as schedules with warm-up do."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == STEPS
        return super().configure_optimizers()


class Validated(Model):
    """Records the batches of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.validations: list[list[torch.Tensor]] = []

    def on_validation_epoch_start(self) -> None:
        self.validations.append([])

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.validations[-1].append(batch["tokens"].clone())


def loader_of(corpus: str, kind: Any = feedline.torch.Loader) -> Any:
    samples = feedline.open(corpus, sequence_length=32, num_samples=48, cache=False)
    return kind(samples, micro_batch_size=4)


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_lightning_does_not_load_is_loaded(
    corpus: str, tmp_path: Path, whole: tuple[Model, Path]
) -> None:
    """``estimated_stepping_batches`` sets up the loaders before the states are read."""
    model, folder = whole
    rest = Scheduled()
    checkpoint = folder / "step=5.ckpt"
    fitted = trainer(tmp_path)
    fitted.fit(rest, datamodule=Data(corpus), ckpt_path=checkpoint, weights_only=False)
    assert torch.equal(torch.stack(rest.seen), tokens_of(corpus)[5:])
    assert rest.losses == model.losses[5:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [feedline.torch.Loader, feedline.torch.Batches])
def test_a_resumed_fit_without_the_state_of_its_loader_is_refused(
    corpus: str, tmp_path: Path, kind: Any
) -> None:
    """Neither has a state in Lightning, so the fit would train again on the first batches."""

    def wrapped() -> Any:
        batches = loader_of(corpus, kind)
        return DataLoader(batches, batch_size=None) if kind is feedline.torch.Loader else batches

    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    trainer(tmp_path, callbacks=[saved], enable_checkpointing=True).fit(Model(), wrapped())
    rest = Model()
    with pytest.raises(ValueError, match="cannot resume a fit of Lightning: .*without a DataLoader"):
        trainer(tmp_path).fit(
            rest, wrapped(), ckpt_path=tmp_path / "step=5.ckpt", weights_only=False
        )
    assert not rest.seen


@pytest.mark.filterwarnings("ignore")
def test_a_second_epoch_has_all_batches(corpus: str, tmp_path: Path) -> None:
    tokens = tokens_of(corpus)
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    model = Model()
    fitted = trainer(tmp_path, max_epochs=3, callbacks=[saved], enable_checkpointing=True)
    fitted.fit(model, loader_of(corpus))
    assert torch.equal(torch.stack(model.seen), torch.cat([tokens] * 3))
    # The state is that of the end of the first epoch.
    assert state_of(tmp_path / "epoch=0.ckpt")["samples_consumed"] == 48
    rest = Model()
    again = trainer(tmp_path, max_epochs=3)
    checkpoint = tmp_path / "epoch=0.ckpt"
    again.fit(rest, loader_of(corpus), ckpt_path=checkpoint, weights_only=False)
    assert torch.equal(torch.stack(rest.seen), torch.cat([tokens] * 2))
    assert rest.losses == model.losses[STEPS:]


@pytest.mark.filterwarnings("ignore")
def test_each_validation_sees_the_same_batches(corpus: str, tmp_path: Path) -> None:
    tokens = tokens_of(corpus)
    model = Validated()
    fitted = trainer(tmp_path, val_check_interval=6)
    fitted.fit(model, loader_of(corpus), loader_of(corpus, feedline.torch.Batches))
    assert torch.equal(torch.stack(model.seen), tokens)
    # Two batches of the sanity check, and two validations.
    assert [len(each) for each in model.validations] == [2, STEPS, STEPS]
    assert all(torch.equal(torch.stack(v), tokens[: len(v)]) for v in model.validations)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checks", [0, 2])
def test_a_validation_that_would_continue_is_refused(
    corpus: str, tmp_path: Path, checks: int
) -> None:
    model = Validated()
    fitted = trainer(tmp_path, num_sanity_val_steps=checks)
    with pytest.raises(ValueError, match="cannot start an evaluation: .*feedline.torch.Batches"):
        fitted.fit(model, loader_of(corpus), loader_of(corpus))
    assert not model.seen


def test_ranks_of_ddp_read_other_samples(
    corpus: str, tmp_path: Path, start: Callable[..., Any]
) -> None:
    loader_ranks.check(start, corpus, tmp_path, "lightning")


@pytest.mark.filterwarnings("ignore")
def test_a_worker_of_a_fit_reads_every_batch_once(corpus: str, tmp_path: Path) -> None:
    model = Model()
    trainer(tmp_path).fit(model, DataLoader(loader_of(corpus), batch_size=None, num_workers=1))
    assert torch.equal(torch.stack(model.seen), tokens_of(corpus))


def test_lightning_has_the_names_that_are_relied_on() -> None:
    loops = {name for name in vars(fit_loop._FitLoop) if "combined_loader" in name}
    assert_known(loops, ["_load_combined_loader_states"], "_FitLoop")
    assert fit_loop.__name__ == "lightning.pytorch.loops.fit_loop"
    assert evaluation_loop.__name__ == "lightning.pytorch.loops.evaluation_loop"

    methods = {name for name in vars(_Stateful) if not name.startswith("_")}
    assert_known(methods, ["load_state_dict", "state_dict"], "_Stateful")
    states = {name for name in dir(CombinedLoader) if "state_dict" in name}
    assert_known(states, ["_load_state_dicts", "_state_dicts"], "CombinedLoader")
    fetcher = parameters_of(_PrefetchDataFetcher)
    assert_known(fetcher, ["prefetch_batches"], "_PrefetchDataFetcher")
