"""The data loader of torchtitan's trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

import feedline
from feedline.torch import Loader


class DataLoader(BaseDataLoader):
    """Feedline's batches as torchtitan takes them: ``({"input", "positions"}, labels)``.

    All are int64 of the shape ``[local_batch_size, seq_len]``. A token without a loss has the label
    -100. In a config: ``dataloader=feedline.torchtitan.DataLoader.Config(dataset_path="corpus")``.
    Its state is part of torchtitan's checkpoints and loads into any number of ranks.

    Raises:
        ValueError: There is no ``dataset_path``, or a setting is out of its range.
        FileNotFoundError: There are no such files.
        CorruptError: They are not what their formats say.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``dataset_path`` is the prefix of a corpus, or the TOML of a run, as for
        `feedline.open`, whose other arguments these are."""

        num_samples: int | None = None
        """Samples that the order is built for. Default: one epoch."""
        seed: int | None = None
        """Seed of the order. Default: 1234."""
        split: str | None = None
        """Shares of the documents for training, validation and test. Default: all for training."""
        reset_at_document: bool = False
        """Whether positions restart after each token that ends a document: the tokenizer's
        ``eos_id``."""
        mask_eod_loss: bool = False
        """Whether that token has no loss."""
        path_to_cache: str | None = None
        """Folder of the sample indexes. Default: beside the corpus."""
        pin_memory: bool = False
        """Whether batches are copied to page-locked memory."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        if not config.dataset_path:
            raise ValueError("cannot open samples: expected dataset_path, found none")
        documents: dict[str, Any] = {}
        if config.reset_at_document or config.mask_eod_loss:
            documents["reset_at_document"] = config.reset_at_document
            documents["mask_eod_loss"] = config.mask_eod_loss
            documents["special"] = {"eod": tokenizer.eos_id}
        dataset = feedline.open(
            config.dataset_path,
            sequence_length=seq_len,
            num_samples=config.num_samples,
            random_seed=config.seed,
            split=config.split,
            path_to_cache=config.path_to_cache,
            **documents,
        )
        self.loader = Loader(
            dataset,
            pin_memory=config.pin_memory,
            micro_batch_size=local_batch_size,
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            labels = batch["labels"].masked_fill_(batch["loss_mask"] == 0, IGNORE_INDEX)
            yield {"input": batch["tokens"], "positions": batch["position_ids"]}, labels

    def state_dict(self) -> dict[str, Any]:
        """The state of `feedline.Loader`, flat: distributed checkpoints load key by key."""
        state = self.loader.state_dict()
        return {**state, "data": json.dumps(state["data"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state, of any number of ranks. An empty one is the start.

        Raises:
            OtherDataError: It is of other data; the text names what differs.
        """
        if state_dict:
            self.loader.load_state_dict({**state_dict, "data": json.loads(state_dict["data"])})
