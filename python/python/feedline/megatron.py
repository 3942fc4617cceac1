"""The data and the checkpoints of Megatron-core and Megatron-LM.

`GPTDataset` replaces Megatron's class of that name in ``BlendedMegatronDatasetBuilder``, with the
same samples and the same cache files. `external_loaders` returns the iterators for
``--dataloader-type external``.

`SaveStrategy` and `LoadStrategy` are arguments of ``dist_checkpointing.save`` and ``load``;
`install` sets them in Megatron-LM. The tensors of a checkpoint are a step in Megatron's folder:

    checkpoints/iter_0000010/common.pt, metadata.json    # written by Megatron
    checkpoints/iter_0000010/step-000000000010/          # written by Feedline

so that ``feedline ckpt verify checkpoints/iter_0000010`` verifies all tensors. ``metadata.json``
names the format ``torch_dist``, which all versions of Megatron accept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import inspect
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import feedline
from feedline._staging import StagesCopies
from feedline.data import Part
from feedline.dcp import StorageReader, StorageWriter
from feedline.torch import Loader, tensors

PARTS: tuple[Part, Part, Part] = ("train", "valid", "test")
NAMES = ("tokens", "labels", "loss_mask", "position_ids")


class GPTDataset(gpt_dataset.GPTDataset):
    """Megatron-core's ``GPTDataset``, which reads through feedline.

    It has the same name because the name is part of the names of cached sample indexes. Give the
    ``DataLoader`` no workers (``--num-workers 0``): threads of feedline read ahead.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: Any,
        num_samples: int | None,
        index_split: Any,
        config: Any,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        self._samples = self._open() if self._is_readable() else None
        self._causal_mask: torch.Tensor | None = None

    def _is_readable(self) -> bool:
        config = self.config
        is_whole = config.drop_last_partial_validation_sequence or self.index_split.name != "valid"
        return bool(config.add_extra_token_to_sequence and is_whole)

    def _open(self) -> feedline.Dataset:
        config = self.config
        # Without a split all documents belong to this part, under other index names in Megatron.
        split, part = (config.split, self.index_split.name) if config.split else ("1,0,0", "train")
        return feedline.open(
            self.dataset.path_prefix,
            sequence_length=config.sequence_length,
            num_samples=self.num_samples,
            random_seed=config.random_seed,
            split=split,
            index_split=PARTS[PARTS.index(part)],
            tokenizer=config.tokenizer.unique_identifiers,
            path_to_cache=config.path_to_cache,
            reset_at_document=config.reset_position_ids,
            mask_eod_loss=config.eod_mask_loss,
            special={"eod": config.tokenizer.eod},
        )

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is None or self._samples is None:  # None requests the padding of a batch
            sample: dict[str, torch.Tensor] = super().__getitem__(idx)
            return sample
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        if self._samples is None:
            return [super(GPTDataset, self).__getitem__(index) for index in indices]
        # Megatron's sampler may exceed the number of samples, up to the end of the last epoch.
        batch = tensors(self._samples._core_of_process.read([int(index) for index in indices]))
        return [
            self._sample({name: batch[name][row] for name in NAMES}) for row in range(len(indices))
        ]

    def _sample(self, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pad = self._pad_token_id
        if pad >= 0:  # the tokenizer has a padding id: mask it
            sample["loss_mask"].masked_fill_(sample["labels"] == pad, 0.0)
            for name in ("tokens", "labels"):
                sample[name].masked_fill_(sample[name] == pad, 0)
        if self.config.create_attention_mask:
            sample["attention_mask"] = self._attention_mask(sample["tokens"])
        return sample

    def _attention_mask(self, tokens: torch.Tensor) -> torch.Tensor:
        """Megatron's dense mask: one for all samples, unless documents restart it."""
        if self._causal_mask is not None:
            return self._causal_mask
        resets, eod = self.config.reset_attention_mask, self.config.tokenizer.eod
        mask: torch.Tensor = gpt_dataset._get_ltor_masks_and_position_ids(
            tokens, eod, False, resets, False, True
        )[0]
        if not resets:
            self._causal_mask = mask
        return mask


def external_loaders(
    args: Any, num_samples: Sequence[int | None], **options: Any
) -> tuple[Loader | None, Loader | None, Loader | None]:
    """The loaders of training, validation and test, for ``--dataloader-type external``.

    Return them from ``train_valid_test_datasets_provider``, and pass
    ``--no-create-attention-mask-in-dataloader``. They start at ``args.consumed_train_samples`` and
    ``args.consumed_valid_samples``, which Megatron-LM has read from the checkpoint by then. A batch
    has ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32) of the shape
    ``[micro_batch_size, seq_length]``. Ranks of one tensor-parallel group read the same batches.

    Args:
        args: The arguments of Megatron-LM, with any of its options for paths and splits.
        num_samples: Samples of each part. 0: the part has no loader. None: one epoch.
        options: Other arguments of `feedline.open`. ``tokenizer=tokenizer.unique_identifiers``
            finds cached indexes of Megatron; ``--reset-position-ids`` and ``--eod-mask-loss`` need
            ``special={"eod": tokenizer.eod}``.

    Returns:
        A loader, or None for a part without samples.

    Raises:
        ValueError: Megatron would read other batches: several prefixes without weights, one prefix
            with a weight, ``--reset-attention-mask``, or no prefix.
        FileNotFoundError: There are no such files.
        CorruptError: The files do not match their formats.
    """
    from megatron.core import parallel_state

    if args.reset_attention_mask:
        raise ValueError(
            "cannot use --reset-attention-mask with --dataloader-type external: expected batches "
            "without attention masks (hint: feedline.megatron.GPTDataset in Megatron's builder)"
        )
    if args.eod_mask_loss:
        options = {"mask_eod_loss": True, **options}
    if args.reset_position_ids:
        options = {"reset_at_document": True, **options}
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    loaders: list[Loader | None] = [None, None, None]
    for place, (part, (paths, split)) in enumerate(zip(PARTS, _parts(args), strict=True)):
        if paths is None or num_samples[place] == 0:
            continue
        dataset = feedline.open(
            _blend(paths),
            sequence_length=args.seq_length,
            num_samples=num_samples[place],
            random_seed=args.seed,
            split=split,
            index_split=part,
            path_to_cache=args.data_cache_path,
            **options,
        )
        loaders[place] = Loader(
            dataset,
            micro_batch_size=args.micro_batch_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            samples_consumed=consumed[place],
        )
    return loaders[0], loaders[1], loaders[2]


def _parts(args: Any) -> list[tuple[list[str] | None, str]]:
    """The paths and the split of each part: all of one blend, or a separate blend for each."""
    paths = args.data_path
    if args.data_args_path is not None:
        paths = Path(args.data_args_path).read_text().split()
    if paths is not None:
        shares = parse_and_normalize_split(args.split)
        return [(paths if share else None, args.split) for share in shares]
    each = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.per_split_data_args_path is not None:
        found = json.loads(Path(args.per_split_data_args_path).read_text())
        each = [
            paths.split() if isinstance(paths := found[part], str) else paths for part in PARTS
        ]
    if not any(each):
        raise ValueError("cannot read --data-path: expected prefixes, found none")
    return list(zip(each, ("1,0,0", "0,1,0", "0,0,1"), strict=True))


def _blend(paths: Sequence[str]) -> str | list[tuple[float, str]]:
    """One prefix, or weights before prefixes."""
    prefixes, weights = get_blend_from_list(list(paths))
    if weights is None and len(prefixes) == 1:
        return str(prefixes[0])
    if weights is None or len(prefixes) == 1:
        raise ValueError(
            f"cannot blend {' '.join(paths)}: expected one prefix, or a weight before each prefix "
            "of several (hint: feedline.megatron.GPTDataset in Megatron's builder)"
        )
    return list(zip(weights, prefixes, strict=True))


class SaveStrategy(strategies.TorchDistSaveShardedStrategy):
    """Saves the sharded tensors and objects of Megatron as a step of Feedline.

    >>> dist_checkpointing.save(state, "checkpoints/iter_0000010", SaveStrategy())

    The step is in that folder, and has the number of its name; 0 if the name has none. All ranks
    commit the step or none does. Objects are stored as Megatron has pickled them. Saving again into
    a folder replaces its step: the folder is no checkpoint until the new step is complete.

    With ``async_sharded_save=True`` the tensors are copied to memory that is reused by the next
    save. A thread of each rank then writes them. The process that Megatron starts only waits.

    Args:
        options: Arguments of `feedline.dcp.StorageWriter`, such as ``timeout`` and ``meta``.

    Raises:
        AbortedError: Another rank has failed; the text has its error.
        OSError: The store failed, or is full.
        ValueError: A tensor that cannot be stored; the text names it.

    Errors of a save are wrapped in DCP's ``CheckpointException``, with the rank that raised them.
    """

    def __init__(self, **options: Any) -> None:
        has_backend = "backend" in inspect.signature(super().__init__).parameters
        super().__init__(*(("torch_dist", 1) if has_backend else ()))
        self.backend, self.version = "torch_dist", 1
        self._options = options

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, **_: Any) -> None:
        """Saves, and returns when the step is complete. All ranks call it."""
        self._save(self._main_replicas(sharded_state_dict), checkpoint_dir, None)

    def async_save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
        **_: Any,
    ) -> Any:
        """Copies the tensors and starts to save them. All ranks call it.

        Args:
            sharded_state_dict: The state; it may change when this returns.
            checkpoint_dir: The folder.
            async_strategy: The kind of the request: ``mcore``, or ``nvrx`` in later versions.

        Returns:
            The ``AsyncRequest``, whose finalize functions raise the error of the save.
        """
        background = _Background.of_default_group()
        group = background.group(self._options.get("timeout", 1800))
        shards = self._main_replicas(sharded_state_dict)
        copies = _copied(shards)
        lock = _ProcessLock()
        future = background.executor.submit(self._save, copies, checkpoint_dir, group)
        future.add_done_callback(lambda _: lock.release())
        return _request_type(async_strategy)(_wait_for, (lock.path,), [_Outcome(future)])

    def _main_replicas(self, sharded_state_dict: Any) -> dict[str, list[Any]]:
        shards: dict[str, list[Any]] = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )[0]
        return shards

    def _save(self, shards: dict[str, list[Any]], folder: str | Path, group: Any) -> None:
        planner = strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        save(
            strategies.mcore_to_pyt_state_dict(shards, False),
            storage_writer=_IterationWriter(folder, _step_of(folder), **self._options),
            planner=planner,
            process_group=group,
        )


class _Background:
    """The thread of all saves in the background, and its process groups. Megatron-LM makes a new
    strategy for each save."""

    _all: weakref.WeakKeyDictionary[Any, _Background] = weakref.WeakKeyDictionary()
    """Keyed by the default process group; destroying it destroys the others."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "feedline-save")
        self._groups: dict[float, Any] = {}

    @classmethod
    def of_default_group(cls) -> _Background:
        default = torch.distributed.group.WORLD
        if default not in cls._all:
            cls._all[default] = cls()
        return cls._all[default]

    def group(self, timeout: float) -> Any:
        """A group for the collectives of the thread. All ranks call it."""
        if timeout not in self._groups:
            limit = timedelta(seconds=timeout)
            self._groups[timeout] = torch.distributed.new_group(backend="gloo", timeout=limit)
        return self._groups[timeout]


class LoadStrategy(strategies.TorchDistLoadShardedStrategy):
    """Loads what `SaveStrategy` has saved, by any number of ranks and with any sharding.

    >>> state = dist_checkpointing.load(sharded_state, "checkpoints/iter_0000010", LoadStrategy())

    A checkpoint that Megatron itself has saved is loaded as Megatron loads it.

    Raises:
        FileNotFoundError: The folder has no complete step.
        CorruptError: A byte differs from what was saved; the text has the file and the offset.
        CheckpointingException: A tensor has another shape, as Megatron reports it.
    """

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path, **options: Any) -> Any:
        """Loads the sharded part of a checkpoint. All ranks call it.

        Args:
            sharded_state_dict: The requested state; its tensors are read in place.
            checkpoint_dir: The folder.
            options: Further arguments of later versions of Megatron.

        Returns:
            The state, with tensors and objects in place of their sharded forms.
        """
        if _is_megatrons(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir, **options)
        reader = StorageReader(checkpoint_dir)
        reader._gives_raw_bytes = True  # Megatron pickles and unpickles its objects
        wanted = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        planner = strategies.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in wanted if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                t.key: t for t in wanted if t.allow_shape_mismatch
            },
        )
        shards, paths, names = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        state = strategies.mcore_to_pyt_state_dict(shards, True)
        load(state, storage_reader=reader, planner=planner)
        state = {
            key: strategies._unwrap_pyt_sharded_tensor(value) for key, value in state.items()
        }
        loaded = strategies._replace_sharded_keys_with_state_dict_keys(state, paths, names)
        strategies._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """Keys, types and global shapes of the tensors, as sharded tensors without data."""
        if metadata is None and not _is_megatrons(checkpoint_dir):
            metadata = StorageReader(checkpoint_dir).read_metadata()
        return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """As `load_tensors_metadata`, and the keys of the objects."""
        if _is_megatrons(checkpoint_dir):
            return super().load_sharded_metadata(checkpoint_dir)
        metadata = StorageReader(checkpoint_dir).read_metadata()
        found = {
            key: ShardedObject.empty_from_unique_key(key)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
        }
        return {**found, **self.load_tensors_metadata(checkpoint_dir, metadata)}


def install(**options: Any) -> None:
    """Makes Megatron-LM save and load with `SaveStrategy` and `LoadStrategy`.

    Call it before ``pretrain()``, and pass ``--ckpt-format torch_dist``, which is the default.
    Earlier checkpoints of Megatron still load.

    Args:
        options: As for `SaveStrategy`.

    Raises:
        ModuleNotFoundError: Megatron-LM cannot be imported; megatron-core alone lacks its script.
        AttributeError: This version of Megatron-LM does not choose strategies by name.
    """
    name = "megatron.training.checkpointing"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, "megatron.training"):
            raise
        raise ModuleNotFoundError(
            f"cannot install checkpoints: expected the module {name}, found none (hint: put "
            "Megatron-LM on PYTHONPATH; with megatron-core alone, pass SaveStrategy() and "
            "LoadStrategy() to dist_checkpointing)",
            name=error.name,
        ) from None
    functions = {
        "get_default_save_sharded_strategy": lambda *_, **__: SaveStrategy(**options),
        "get_default_load_sharded_strategy": lambda *_, **__: LoadStrategy(),
    }
    for function in functions:
        if not hasattr(module, function):
            raise AttributeError(
                f"cannot install checkpoints: expected {function} in {name}, found none (hint: "
                "pass SaveStrategy() and LoadStrategy() to dist_checkpointing)"
            )
    vars(module).update(functions)


class _IterationWriter(StorageWriter):
    """Writes into the folder of an iteration, which has one step."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not is_coordinator:
            return
        folder = Path(self.folder)
        # First the files that mark a checkpoint, then its tensors, so that two saves never mix.
        for name in ("metadata.json", ".metadata"):
            (folder / name).unlink(missing_ok=True)
        _sync(folder)
        if os.path.lexists(self.checkpoint_id):
            shutil.rmtree(self.checkpoint_id)
        if (folder / "common.pt").exists():
            _sync(folder / "common.pt")


def _step_of(folder: str | Path) -> int:
    """The iteration in the name of Megatron's folder."""
    found = re.fullmatch(r"iter_(\d+)", Path(folder).name)
    return int(found[1]) if found else 0


def _is_megatrons(folder: str | Path) -> bool:
    """Whether Megatron itself has written the tensors."""
    return (Path(folder) / ".metadata").exists()


def _sync(path: Path) -> None:
    """Makes a file or the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copied(shards: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The same shards with copies of their tensors and objects."""
    held = {key: [shard.data for shard in each] for key, each in shards.items()}
    copies = StagesCopies().stage(held)
    return {
        key: [
            dataclasses.replace(shard, data=copy)
            for shard, copy in zip(shards[key], data, strict=True)
        ]
        for key, data in copies.items()
    }


class _ProcessLock:
    """A lock of this process for which other processes can wait. The kernel releases it at exit."""

    def __init__(self) -> None:
        self._file, self.path = tempfile.mkstemp(prefix="feedline-save-")
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        os.close(self._file)  # first: this releases the lock
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _wait_for(path: str) -> None:
    """Runs in the process that Megatron starts for a save, and only waits for the rank's thread."""
    try:
        with open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
    except FileNotFoundError:
        pass  # the save has ended


class _Outcome:
    """Raises the error of the thread in the training loop."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __call__(self) -> None:
        self._future.result()


def _request_type(async_strategy: str) -> Any:
    """The class of requests; Megatron 0.17 and later have two."""
    choose = getattr(strategies, "get_async_strategy", None)
    if choose is None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

        return AsyncRequest
    return choose(async_strategy, module="AsyncRequest")[1]
