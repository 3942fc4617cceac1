"""Samples for Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

import torch

import feedline
from feedline.torch import MapDataset


class CausalLMDataset(MapDataset):
    """Samples of a causal language model: ``input_ids``, ``labels`` and ``shift_labels``.

    Models of transformers shift ``labels`` themselves; given ``shift_labels`` they take those as
    they are, so that the last token has its label too. Pass to ``TrainingArguments``:
    ``train_sampling_strategy="sequential"``, ``remove_unused_columns=False`` and
    ``dataloader_drop_last=True``. A resumed ``Trainer`` skips numbers of samples, and reads nothing
    of what it skips.

    Args:
        source: As `feedline.open` takes it, or what it returned.
        options: As for `feedline.open`.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        opened = isinstance(source, feedline.Dataset)
        super().__init__(source if opened else feedline.open(source, **options))

    def sample(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = tensors["labels"]
        ignored = tensors["loss_mask"] == 0
        if ignored.any():
            labels = labels.masked_fill(ignored, -100)
        return {"input_ids": tensors["tokens"], "labels": labels, "shift_labels": labels}
