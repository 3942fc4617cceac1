"""Hugging Face's Trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loader_ranks
import pytest
import torch
import trainer_run
from transformers import Trainer, TrainingArguments

import feedline
import feedline.torch
from feedline.transformers import CausalLMDataset


@pytest.fixture(scope="module")
def dataset(corpus: str) -> feedline.Dataset:
    return feedline.open(
        corpus,
        sequence_length=32,
        num_samples=96,
        cache=False,
        tokenizer="gpt2",
        mask_eod_loss=True,
    )


def batch_of(samples: CausalLMDataset, **changes: Any) -> dict[str, torch.Tensor]:
    items = samples.__getitems__(range(32))
    names = [name for name in items[0] if name not in changes.get("without", ())]
    return {name: torch.stack([item[name] for item in items]) for name in names}


def test_the_loss_matches_megatrons_labels(dataset: feedline.Dataset) -> None:
    model = trainer_run.tiny_model().eval()
    raw = {name: torch.from_numpy(array) for name, array in dataset.read(range(32)).items()}
    assert 0 < raw["loss_mask"].sum() < raw["loss_mask"].numel()
    with torch.no_grad():
        logits = model(raw["tokens"]).logits
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), raw["labels"].flatten(), reduction="none"
        )
        expected = (each * raw["loss_mask"].flatten()).sum() / raw["loss_mask"].sum()
        found = model(**batch_of(CausalLMDataset(dataset))).loss
    torch.testing.assert_close(found, expected)


def test_a_model_that_shifts_labels_itself_has_the_same_targets(dataset: feedline.Dataset) -> None:
    model = trainer_run.tiny_model().eval()
    raw = {name: torch.from_numpy(array) for name, array in dataset.read(range(32)).items()}
    mask = raw["loss_mask"].clone()
    mask[:, -1] = 0  # such a model has no label of the last token
    with torch.no_grad():
        logits = model(raw["tokens"]).logits
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), raw["labels"].flatten(), reduction="none"
        )
        expected = (each * mask.flatten()).sum() / mask.sum()
        found = model(**batch_of(CausalLMDataset(dataset), without=["shift_labels"])).loss
    torch.testing.assert_close(found, expected)


def test_position_ids_restart_at_documents(corpus: str) -> None:
    options = {"sequence_length": 32, "num_samples": 96, "cache": False}
    plain = CausalLMDataset(corpus, **options)
    restarted = CausalLMDataset(corpus, tokenizer="gpt2", reset_at_document=True, **options)
    assert set(plain[0]) == {"input_ids", "labels", "shift_labels"}
    assert set(restarted[0]) == {"input_ids", "labels", "shift_labels", "position_ids"}
    assert any((restarted[index]["position_ids"][1:] == 0).any() for index in range(96))


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_ranks_match_megatrons_batches(
    dataset: feedline.Dataset, ranks: int
) -> None:
    from accelerate.data_loader import prepare_data_loader

    loader = torch.utils.data.DataLoader(CausalLMDataset(dataset), batch_size=4, drop_last=True)
    for rank in range(ranks):
        shard = prepare_data_loader(loader, num_processes=ranks, process_index=rank)
        ours = feedline.Loader(
            dataset, micro_batch_size=4, data_parallel_rank=rank, data_parallel_size=ranks
        )
        for found, batch in zip(shard, ours, strict=True):
            assert torch.equal(found["input_ids"], torch.from_numpy(batch["tokens"]))


@pytest.mark.parametrize("kind", ["accelerate", "trainer"])
def test_ranks_read_other_samples(
    corpus: str, tmp_path: Path, start: Callable[..., Any], kind: str
) -> None:
    loader_ranks.check(start, corpus, tmp_path, kind)


def test_a_loader_that_accelerate_prepared(dataset: feedline.Dataset) -> None:
    """In one process: it is read again in each loop, and its state is a batch ahead."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    whole = torch.from_numpy(dataset.read(range(96))["tokens"])
    source = feedline.torch.Loader(dataset, micro_batch_size=4)
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(source, batch_size=None, num_workers=workers)
        prepared = accelerator.prepare(loader)
        for _ in range(2):
            assert torch.equal(torch.cat([batch["tokens"] for batch in prepared]), whole)
        with pytest.raises(ValueError, match="cannot save the state of a loader"):
            source.state_dict()
        source.load_state_dict(feedline.Loader(dataset, micro_batch_size=4).state_dict())


def test_a_loader_in_accelerates_stateful_loader_resumes(dataset: feedline.Dataset) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )

    def prepared() -> Any:
        source = feedline.torch.Loader(dataset, micro_batch_size=4)
        return accelerator.prepare(torch.utils.data.DataLoader(source, batch_size=None))

    first, second = prepared(), prepared()
    head = [batch["tokens"] for batch in itertools.islice(first, 7)]
    second.load_state_dict(first.state_dict())
    rest = [batch["tokens"] for batch in second]
    whole = torch.from_numpy(dataset.read(range(96))["tokens"])
    assert torch.equal(torch.cat([*head, *rest]), whole)


def test_epochs_and_evaluations_read_the_same_samples(
    dataset: feedline.Dataset, tmp_path: Path
) -> None:
    samples, held = (trainer_run.RecordedDataset(dataset) for _ in range(2))
    arguments = TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        eval_strategy="epoch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_drop_last=True,
    )
    trainer = Trainer(
        trainer_run.tiny_model(), arguments, train_dataset=samples, eval_dataset=held
    )
    trainer.train()
    epoch = [list(range(first, first + 4)) for first in range(0, 96, 4)]
    assert samples.read == epoch * 2 and held.read == epoch * 2


def test_a_killed_run_resumes_bit_for_bit(
    corpus: str, tmp_path: Path, start: Callable[..., Any]
) -> None:
    program = start(trainer_run.__file__, corpus, tmp_path / "killed", 15)
    losses, weights, whole = trainer_run.run(corpus, tmp_path / "whole")
    program.wait_for("paused")
    program.kill()
    resumed, resumed_weights, rest = trainer_run.run(corpus, tmp_path / "killed", resume=True)
    assert list(losses) == list(range(1, 25)) and list(resumed) == list(range(11, 25))
    assert resumed == {step: losses[step] for step in range(11, 25)}
    assert torch.equal(weights, resumed_weights)
    # Step 10 was saved, so no sample before 40 is read again.
    assert [indices[0] for indices in rest.read] == list(range(40, 96, 4))
    assert whole.dataset._core.hits == 22 and rest.dataset._core.hits == 12


def test_unused_columns_may_be_removed(
    dataset: feedline.Dataset, tmp_path: Path
) -> None:
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(
        trainer_run.tiny_model(),
        arguments,
        train_dataset=CausalLMDataset(dataset),
        eval_dataset=CausalLMDataset(dataset),
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
