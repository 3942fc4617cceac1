"""Samples and batches as torch tensors, for training loops of PyTorch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

import feedline
from feedline.data import Arrays


def tensors(arrays: Arrays, *, pin_memory: bool = False) -> dict[str, torch.Tensor]:
    """Tensors over the memory of arrays; with `pin_memory` copies in page-locked memory, from which
    ``.to(device, non_blocking=True)`` copies asynchronously."""
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if pin_memory:
        found = {name: tensor.pin_memory() for name, tensor in found.items()}
    return found


class MapDataset(TorchDataset[dict[str, torch.Tensor]]):
    """A `feedline.Dataset` whose items are dicts of tensors, for ``torch.utils.data.DataLoader``.

    Use a sequential sampler: index `i` is sample `i` of the run, which is shuffled already. Leave
    ``num_workers`` at 0: threads of feedline read ahead.
    """

    def __init__(self, dataset: feedline.Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample(tensors(self.dataset[index]))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        batch = tensors(self.dataset.read(indices))
        names = [name for name in batch if name not in feedline.data.OFFSETS]
        return [
            self.sample({name: batch[name][row] for name in names}) for row in range(len(indices))
        ]

    def sample(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the item for the tensors of a sample, here the tensors. For subclasses."""
        return tensors


class Loader(IterableDataset[dict[str, torch.Tensor]]):
    """A `feedline.Loader` of dicts of tensors, with ``state_dict`` and ``load_state_dict``.

    It is an iterator and needs no ``DataLoader``. In torchdata's ``StatefulDataLoader`` pass
    ``batch_size=None``, and no more than one worker.

    Args:
        dataset: What `feedline.open` returned.
        pin_memory: Whether batches are copied to page-locked memory, for asynchronous copies to a
            GPU.
        options: As for `feedline.Loader`.
    """

    def __init__(
        self, dataset: feedline.Dataset, *, pin_memory: bool = False, **options: Any
    ) -> None:
        self.dataset = dataset
        self._options = options
        self._pin_memory = pin_memory
        self._loader: feedline.Loader | None = feedline.Loader(dataset, **options)
        self._process = os.getpid()
        self._consumed = self._loader.samples_consumed

    @property
    def loader(self) -> feedline.Loader:
        """The underlying loader of arrays: one per process, opened at its first use."""
        if self._loader is None or self._process != os.getpid():
            options = {**self._options, "samples_consumed": self._consumed}
            self._loader = feedline.Loader(self.dataset, **options)
            self._process = os.getpid()
        return self._loader

    def __len__(self) -> int:
        """Batches of the whole run, not only the remaining ones."""
        return len(self.loader)

    def __iter__(self) -> Self:
        """Returns itself: a second loop continues where the first ended.

        Raises:
            ValueError: It is called in one of several workers of a ``DataLoader``.
        """
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise ValueError(
                f"cannot read one stream in {workers.num_workers} workers: expected num_workers=0, "
                "each would return every batch (hint: threads of feedline read ahead)"
            )
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch: tensors of the shape ``[micro_batch_size, ...]``.

        After an error, the next call tries the same batch again.

        Raises:
            StopIteration: The run has no further batch.
            StalledError: There was no data within the timeout.
            CorruptError: The bytes differ from their checksum.
        """
        loader = self.loader
        batch = tensors(next(loader), pin_memory=self._pin_memory)
        self._consumed = loader.samples_consumed
        return batch

    @property
    def samples_consumed(self) -> int:
        """Samples that all ranks together have consumed."""
        return self._consumed

    def state_dict(self) -> dict[str, Any]:
        """As `feedline.Loader.state_dict`."""
        return self.loader.state_dict()

    def save_state(self) -> dict[str, Any]:
        """Megatron's name for `state_dict`."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `feedline.Loader.load_state_dict`.

        Raises:
            OtherDataError: It is of other data; the text names what differs.
            ValueError: It is not the state of a loader.
        """
        self.loader.load_state_dict(state)
        self._consumed = self.loader.samples_consumed

    def close(self) -> None:
        """As `feedline.Loader.close`."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the configuration: threads cannot be sent to a worker process."""
        return {**self.__dict__, "_loader": None}
