"""The data loader of torchtitan's trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

import feedline
from feedline.torch import Loader


class DataLoader(BaseDataLoader):
    """Feedline's batches as torchtitan takes them: ``({"input", "positions"}, labels)``.

    In a config: ``dataloader=feedline.torchtitan.DataLoader.Config(dataset_path="corpus")``. Its
    state loads into any number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_samples: int | None = None
        """Samples that the order is built for. Default: one epoch."""
        seed: int = 1234
        """Seed of the order."""
        split: str = "1,0,0"
        """Shares of the documents for training, validation and test."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        dataset = feedline.open(
            config.dataset_path,
            sequence_length=seq_len,
            num_samples=config.num_samples,
            random_seed=config.seed,
            split=config.split,
        )
        self.loader = Loader(
            dataset,
            micro_batch_size=local_batch_size,
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            yield {"input": batch["tokens"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(state_dict)
