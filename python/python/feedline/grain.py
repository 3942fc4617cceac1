"""Batches for Grain and JAX: an element is a whole batch, and the state one number.

A `feedline.Dataset` is a ``grain.RandomAccessDataSource``. `Batches` is faster: Grain's
``batch`` reads a source sample by sample.
"""

from __future__ import annotations

from typing import Any

import grain.python as grain

import feedline
from feedline.data import Arrays


class Batches(grain.IterDataset[Arrays]):
    """The batches of one rank as a ``grain.IterDataset``.

    An element is a dict of arrays of the shape ``[micro_batch_size, ...]``, as `feedline.Loader`
    returns it. Grain's transformations can follow; none is needed for prefetching.

    Args:
        dataset: What `feedline.open` returned.
        options: As for `feedline.Loader`.
    """

    def __init__(self, dataset: feedline.Dataset, **options: Any) -> None:
        super().__init__()
        self._dataset = dataset
        self._options = options

    def __iter__(self) -> BatchIterator:
        """A new iterator with its own threads, from the first batch."""
        return BatchIterator(feedline.Loader(self._dataset, **self._options))


class BatchIterator(grain.DatasetIterator[Arrays]):
    """An iterator that can be checkpointed, created by `Batches`."""

    def __init__(self, loader: feedline.Loader) -> None:
        super().__init__()
        self._loader = loader

    def __next__(self) -> Arrays:
        """The next batch. After an error, the next call tries the same batch again.

        Raises:
            StopIteration: The run has no further batch.
            StalledError: There was no data within the timeout.
            CorruptError: The bytes differ from their checksum.
        """
        return next(self._loader)

    def get_state(self) -> dict[str, Any]:
        """The state of `feedline.Loader`, which JSON can store."""
        return self._loader.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state, of any number of ranks.

        Raises:
            OtherDataError: It is of other data; the text names what differs.
            ValueError: It is not the state of a loader.
        """
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """Ends the threads and frees the memory. Arrays that remain stay valid."""
        self._loader.close()
