"""Samples for Hugging Face's ``Trainer``."""

from __future__ import annotations

import tomllib
from typing import Any

import torch

import feedline
from feedline.torch import MapDataset


# The label that losses of PyTorch leave out.
IGNORED = -100


class CausalLMDataset(MapDataset):
    """Samples of a causal language model: ``input_ids``, ``labels`` and ``shift_labels``.

    All are int64 of the shape ``[sequence_length]``. ``labels`` are the tokens themselves, because
    models of transformers shift them. ``shift_labels`` are the next tokens, the last one included;
    models take them as they are, if ``remove_unused_columns=False`` lets them pass. A token without
    a loss has the label -100. With ``reset_at_document=True`` there are ``position_ids`` too.

    Pass to ``TrainingArguments``: ``train_sampling_strategy="sequential"``,
    ``remove_unused_columns=False`` and ``dataloader_drop_last=True``. A resumed ``Trainer`` skips
    numbers of samples, and reads nothing of what it skips.

    Args:
        source: As `feedline.open` takes it, or what it returned.
        options: As for `feedline.open`.

    Raises:
        ValueError: A setting is out of its range, or the samples are not of a causal model.
        FileNotFoundError: There are no such files.
        CorruptError: They are not what their formats say.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        is_open = isinstance(source, feedline.Dataset)
        super().__init__(source if is_open else feedline.open(source, **options))
        data = tomllib.loads(self.dataset.config)["data"]
        if (objective := data.get("objective", "lm")) != "lm":
            raise ValueError(
                f"cannot use samples for a causal model: expected objective 'lm', "
                f"found {objective!r}"
            )
        self._has_positions = bool(data.get("reset_at_document"))

    def sample(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The items of one sample by the names of transformers."""
        tokens, labels = tensors["tokens"], tensors["labels"]
        sample = {"input_ids": tokens, "labels": tokens, "shift_labels": labels}
        ignored = tensors["loss_mask"] == 0
        if ignored.any():
            sample["shift_labels"] = labels.masked_fill(ignored, IGNORED)
            # The label of a token is the target of the one before it.
            sample["labels"] = tokens.clone()
            sample["labels"][1:].masked_fill_(ignored[:-1], IGNORED)
        if self._has_positions:
            sample["position_ids"] = tensors["position_ids"]
        return sample
