"""Samples and batches as torch tensors, for training loops of PyTorch."""

from __future__ import annotations

import copy
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data import Dataset as TorchDataset

import feedline
from feedline import _ranks
from feedline.data import Arrays

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


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
        return self.__getitems__([index])[0]

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

    It is an iterator for training and needs no ``DataLoader``: a loop continues where the last one
    stopped, and after the last batch starts again at the first sample. For evaluation use
    `Batches`. In torchdata's ``StatefulDataLoader`` pass ``batch_size=None``, and no more than one
    worker. Where accelerate divides batches among processes, pass no ranks.

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
        # Whether no batch was read since the start, since the end, or since a state was loaded.
        self._is_fresh = True
        self._is_placed = self._consumed > 0
        # Processes of accelerate, whose DataLoader reads a batch ahead; 0 without it.
        self._accelerate = 0
        self._is_of_batches = False
        self._share()

    def _share(self) -> None:
        # One byte that worker processes share: 1 after one of them has started to read.
        self._in_worker = mmap.mmap(-1, 1)

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
        self._note_accelerate()
        return len(self.loader)

    def __iter__(self) -> Self:
        """Returns itself. After the last batch it starts again at the first sample.

        Raises:
            ValueError: It is called in one of several workers of a ``DataLoader``, by an
                evaluation of Lightning, or under ``torch.no_grad()`` after some batches; accelerate
                and the arguments divide the samples twice; or there are too few samples.
        """
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise ValueError(
                f"cannot read one stream in {workers.num_workers} workers: expected num_workers=0, "
                "each would return every batch (hint: threads of feedline read ahead)"
            )
        if workers is not None:
            self._in_worker[0] = 1
        self._note_accelerate()
        iter(self.loader)
        place = self.loader.samples_consumed
        is_restarted, self._consumed = place != self._consumed, place
        self._is_fresh = self._is_fresh or is_restarted
        self._check_evaluation()
        return self

    def _check_evaluation(self) -> None:
        if self._is_of_batches:
            return
        found = f"the place after sample {self._consumed}"
        if _lightning_evaluates():
            # Its sanity check reads some batches, which the first validation would lack.
            found = "a feedline.torch.Loader, which continues"
        elif self._is_fresh or torch.is_grad_enabled():
            return
        raise ValueError(
            f"cannot start an evaluation: expected its first sample, found {found} (hint: "
            "feedline.torch.Batches starts each loop at the first sample; next(loader) continues)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate in all processes before each loop; the order does not depend on it.

        Raises:
            ValueError: Accelerate and the arguments divide the samples twice.
        """
        self._note_accelerate()

    def _note_accelerate(self) -> None:
        """If accelerate divides the batches of this loader, it reads those of all ranks."""
        processes = _ranks.accelerate_processes()
        if processes is None or processes == self._accelerate:
            return
        size = self._options.get("data_parallel_size")
        if processes > 1 and size not in (None, 1):
            raise ValueError(
                "cannot divide the samples twice: expected data_parallel_size or a DataLoader of "
                f"accelerate, found {size} ranks and {processes} processes (hint: omit "
                "data_parallel_rank and data_parallel_size, or read the loader itself)"
            )
        self._accelerate = processes
        if processes > 1 and size is None:
            self._options = {**self._options, "data_parallel_rank": 0, "data_parallel_size": 1}
            self._loader = None

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next batch: tensors of the shape ``[micro_batch_size, ...]``.

        After an error, the next call tries the same batch again.

        Raises:
            StopIteration: The run has no further batch.
            StalledError: There was no data within the timeout.
            CorruptError: The bytes differ from their checksum.
            ValueError: Lightning has resumed a fit, but not loaded the state of this loader.
        """
        if self._is_fresh:
            self._check_lightning()
        loader = self.loader
        batch = tensors(next(loader), pin_memory=self._pin_memory)
        self._consumed = loader.samples_consumed
        self._is_fresh = False
        return batch

    def _check_lightning(self) -> None:
        """Loads the state of a resumed fit, which Lightning may have forgotten.

        Lightning 2.6 loads states of loaders when it sets them up. A model whose
        ``configure_optimizers`` reads ``trainer.estimated_stepping_batches`` sets them up before
        the states are read. It does not load them at the end of an epoch either.
        """
        loop = _lightning_loop()
        if loop is None or _lightning_evaluates():
            return
        states, loaders = loop._combined_loader_states_to_load, loop._combined_loader
        if states and any(each is self for each in loaders.flattened):
            loop._combined_loader_states_to_load = []
            loaders._load_state_dicts(states)
            iter(self.loader)  # the end of an epoch is the start of the next one
            self._consumed = self.loader.samples_consumed
        elif states or not (self._is_placed or loop.epoch_loop.batch_progress.current.ready == 0):
            raise ValueError(
                "cannot resume a fit of Lightning: expected the state of its loader, found none "
                "that was loaded (hint: pass feedline.torch.Loader itself to fit, without a "
                "DataLoader)"
            )

    @property
    def samples_consumed(self) -> int:
        """Samples that all ranks together have consumed.

        Raises:
            ValueError: As for `state_dict`.
        """
        self._check_place()
        return self._consumed

    def _check_place(self) -> None:
        if self._in_worker[0] and get_worker_info() is None:
            found = "a worker process that has read them"
        # torchdata's state is that of the batch before.
        elif self._accelerate > 1 or (self._accelerate and not _ranks.is_called_by("torchdata")):
            found = "a DataLoader of accelerate, which reads ahead"
        else:
            return
        raise ValueError(
            f"cannot save the state of a loader: expected its batches in this loop, found {found} "
            "(hint: read the loader itself, without a DataLoader; StatefulDataLoader has the state "
            "of its worker)"
        )

    def state_dict(self) -> dict[str, Any]:
        """As `feedline.Loader.state_dict`.

        Raises:
            ValueError: A worker process or accelerate has read batches, so that the place of the
                training loop is not known here.
        """
        self._check_place()
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
        self._is_fresh = self._is_placed = True
        if get_worker_info() is None:
            self._accelerate = self._in_worker[0] = 0

    def close(self) -> None:
        """As `feedline.Loader.close`."""
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the configuration: threads cannot be sent to a worker process."""
        if get_spawning_popen() is not None:
            self._in_worker[0] = 1
        state = {**self.__dict__, "_loader": None}
        del state["_in_worker"]
        if "data_parallel_rank" not in self._options and _ranks.of_group()[1] > 1:
            # A spawned process has no process group.
            rank, size = _ranks.of_process()
            ranks = {"data_parallel_rank": rank, "data_parallel_size": size}
            state["_options"] = {**self._options, **ranks}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share()


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches for evaluation: each loop starts at the first sample, whatever the last one read.

    A batch is that of `Loader`. It has no state. Several loops at a time are independent.

    Args:
        dataset: What `feedline.open` returned.
        options: As for `Loader`. ``samples_consumed`` is where each loop starts.
    """

    def __init__(self, dataset: feedline.Dataset, **options: Any) -> None:
        self._start = Loader(dataset, **options)
        self._start._is_of_batches = True

    def __len__(self) -> int:
        """Batches of a loop from the first sample."""
        return len(self._start)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """An iterator with its own threads, which end with it.

        Raises:
            ValueError: As for `Loader`, at the first batch.
        """
        with copy.copy(self._start) as loader:
            yield from loader

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._start.set_epoch(epoch)


def _lightning_evaluates() -> bool:
    return any(_ranks.is_called_by(f"{name}.loops.evaluation_loop") for name in LIGHTNING)


def _lightning_loop() -> Any:
    """The loop of Lightning's ``fit`` among the callers, or None."""
    names = [f"{name}.loops.fit_loop" for name in LIGHTNING if name in sys.modules]
    for frame in _ranks.callers() if names else ():
        if frame.f_globals.get("__name__") in names:
            return frame.f_locals.get("self")
    return None
