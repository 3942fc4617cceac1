"""Batches for Grain and JAX: an element is a whole batch, and the state one number."""

from __future__ import annotations

from typing import Any

import grain.python as grain

import feedline
from feedline.data import Arrays


class Batches(grain.IterDataset[Arrays]):
    """The batches of one rank as a ``grain.IterDataset``.

    Args:
        dataset: What `feedline.open` returned.
        options: As for `feedline.Loader`.
    """

    def __init__(self, dataset: feedline.Dataset, **options: Any) -> None:
        super().__init__()
        self._dataset = dataset
        self._options = options

    def __iter__(self) -> BatchIterator:
        return BatchIterator(feedline.Loader(self._dataset, **self._options))


class BatchIterator(grain.DatasetIterator[Arrays]):
    """An iterator that can be checkpointed."""

    def __init__(self, loader: feedline.Loader) -> None:
        super().__init__()
        self._loader = loader

    def __next__(self) -> Arrays:
        return next(self._loader)

    def get_state(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
