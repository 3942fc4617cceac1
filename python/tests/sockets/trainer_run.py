"""A run of Hugging Face's Trainer: ``python trainer_run.py CORPUS FOLDER PAUSE_AFTER``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import feedline.transformers

STEPS = 24
BATCH = 4


class RecordedDataset(feedline.transformers.CausalLMDataset):
    """Records the numbers of the samples that were read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.read: list[list[int]] = []

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        self.read.append(list(indices))
        return super().__getitems__(indices)


class Recorder(TrainerCallback):
    """Records the loss of each step, and waits to be killed after one of them."""

    def __init__(self, pause_after: int | None) -> None:
        self.losses: dict[int, float] = {}
        self.pause_after = pause_after

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.pause_after:
            print("paused", flush=True)
            time.sleep(600)


def tiny_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50257, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    )


def run(
    corpus: str, folder: Path, *, pause_after: int | None = None, resume: bool = False
) -> tuple[dict[int, float], torch.Tensor, RecordedDataset]:
    """Trains; returns the loss of each step, all weights in one tensor, and the dataset."""
    dataset = RecordedDataset(corpus, sequence_length=32, num_samples=STEPS * BATCH, cache=False)
    recorder = Recorder(pause_after)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_steps=10,
        logging_steps=1,
        learning_rate=0.01,
        seed=7,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_drop_last=True,
    )
    trainer = Trainer(tiny_model(), arguments, train_dataset=dataset, callbacks=[recorder])
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([value.flatten() for value in trainer.model.state_dict().values()])
    return recorder.losses, weights, dataset


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), pause_after=int(sys.argv[3]))
