"""The data and the checkpoints of Megatron-core and Megatron-LM.

`GPTDataset` replaces Megatron's class of that name in ``BlendedMegatronDatasetBuilder``, with the
same samples and the same cache files. `external_loaders` returns the iterators for
``--dataloader-type external``.

`SaveStrategy` and `LoadStrategy` are arguments of ``dist_checkpointing.save`` and ``load``;
`install` sets them in Megatron-LM. The tensors of a checkpoint are a step in Megatron's folder:

    checkpoints/iter_0000010/common.pt, metadata.json    # as Megatron writes them
    checkpoints/iter_0000010/step-000000000010/          # the tensors

so that ``feedline ckpt verify checkpoints/iter_0000010`` verifies all tensors. ``metadata.json``
names the format ``torch_dist``, which all versions of Megatron accept. Megatron-core 0.19 has no
``common.pt`` in its own checkpoints; `SaveStrategy` writes it there, so that every release loads
the checkpoint. The releases from 0.16.1 to 0.19.2 load what any other of them has saved.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import importlib
import inspect
import io
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
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split, get_blend_from_list
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import feedline
from feedline import _megatron_options as known
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

    Megatron's own code reads the samples, with no read-ahead, of a config with
    ``inter_document_masking``, without ``add_extra_token_to_sequence``, or with a last partial
    sequence in validation.

    Raises:
        ValueError: The config sets a field that this version of Feedline does not know, or its
            ``sequences_per_dataset`` do not match the corpus.
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
        known.check_config(config)
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        self._samples = self._open() if self._is_readable() else None
        self._causal_mask: torch.Tensor | None = None

    def _is_readable(self) -> bool:
        config = self.config
        is_whole = config.drop_last_partial_validation_sequence or self.index_split.name != "valid"
        is_masked = getattr(config, "inter_document_masking", False)  # since 0.19
        return bool(config.add_extra_token_to_sequence and is_whole and not is_masked)

    def _open(self) -> feedline.Dataset:
        config = self.config
        known.check_sequences(config, self.dataset.path_prefix)
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
        if self.config.create_attention_mask:
            # First: a masked token has the id 0, which may be that of the end of a document.
            sample["attention_mask"] = self._attention_mask(sample["tokens"])
        _mask_pad(sample, self._pad_token_id)
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


def _mask_pad(batch: dict[str, torch.Tensor], pad: int | None) -> None:
    """Masks a padding id in a sample or a batch; a negative one is in no corpus."""
    if pad is None or pad < 0:
        return
    batch["loss_mask"].masked_fill_(batch["labels"] == pad, 0.0)
    for name in ("tokens", "labels"):
        batch[name].masked_fill_(batch[name] == pad, 0)


def external_loaders(
    args: Any, num_samples: Sequence[int | None], *, tokenizer: Any = None, **options: Any
) -> tuple[Loader | None, Loader | None, Loader | None]:
    """The loaders of training, validation and test, for ``--dataloader-type external``.

    Return them from ``train_valid_test_datasets_provider``, and pass
    ``--no-create-attention-mask-in-dataloader``. They start at ``args.consumed_train_samples`` and
    ``args.consumed_valid_samples``, which Megatron-LM has read from the checkpoint by then, or at
    the first sample of a phase of ``--phase-transition-iterations``. A batch has ``tokens``,
    ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32) of the shape
    ``[micro_batch_size, seq_length]``; validation and test have ``--eval-micro-batch-size`` rows.
    Ranks of one tensor-parallel group read the same batches.

    Args:
        args: The arguments of Megatron-LM, with any of its options for paths and splits.
        num_samples: Samples of each part. 0: the part has no loader. None: one epoch.
        tokenizer: Megatron's tokenizer: its padding id is masked, its end of documents serves
            ``--reset-position-ids`` and ``--eod-mask-loss``, and cached indexes of Megatron are
            found. Default: that of Megatron-LM (``get_tokenizer()``), if it has built one. Its
            ``unique_identifiers`` alone find only the indexes.
        options: Other arguments of `feedline.open`, such as ``special={"eod": 0}``.

    Returns:
        A loader, or None for a part without samples.

    Raises:
        ValueError: Megatron would read other batches: several prefixes without weights, one prefix
            with a weight, or no prefix; a blend with another ``--mid-level-dataset-surplus`` than
            0.005; ``--reset-attention-mask``, ``--dataloader-inter-document-masking``,
            ``--full-validation``, ``--fim-data``, ``--sft``, ``--mock-data``; batches with
            attention masks; an argument for data that this version of Feedline does not know.
        FileNotFoundError: There are no such files.
        CorruptError: The files do not match their formats.
    """
    from megatron.core import parallel_state

    parts = _parts(args)
    known.check_arguments(args, [paths for paths, _ in parts])
    pad, options = _of_tokenizer(args, tokenizer, options)
    consumed, micro = known.consumed_samples(args), known.micro_batch_sizes(args)
    loaders: list[Loader | None] = [None, None, None]
    for place, (part, (paths, split)) in enumerate(zip(PARTS, parts, strict=True)):
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
        loaders[place] = _PadMaskingLoader(
            dataset,
            pad=pad,
            micro_batch_size=micro[place],
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            samples_consumed=consumed[place],
        )
    return loaders[0], loaders[1], loaders[2]


class _PadMaskingLoader(Loader):
    """A loader that masks the padding id of Megatron's tokenizer, as its datasets do."""

    def __init__(self, dataset: feedline.Dataset, *, pad: int | None, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._pad = pad

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = super().__next__()
        _mask_pad(batch, self._pad)
        return batch


class _PadRule(MegatronDataset):
    """A dataset without samples, which applies the installed release's rule for padding ids."""

    def __init__(self, args: Any, tokenizer: Any) -> None:
        config = SimpleNamespace(
            **dict.fromkeys(self._key_config_attributes()),
            allow_ambiguous_pad_tokens=getattr(args, "allow_ambiguous_pad_tokens", False),
        )
        config.tokenizer = tokenizer
        super().__init__(None, None, None, None, Split.train, config)

    def __len__(self) -> int:
        return 0

    def __getitem__(self, idx: int) -> Any:
        raise IndexError(idx)


def _of_tokenizer(
    args: Any, tokenizer: Any, options: dict[str, Any]
) -> tuple[int | None, dict[str, Any]]:
    """The padding id, or None, and the options of `feedline.open`."""
    is_megatrons = hasattr(tokenizer, "unique_identifiers")
    megatrons = tokenizer if is_megatrons else known.tokenizer_of_megatron()
    if megatrons is not None and (is_megatrons or tokenizer is None):
        tokenizer = megatrons.unique_identifiers
    options = {"tokenizer": tokenizer, **options}
    if args.eod_mask_loss:
        options = {"mask_eod_loss": True, **options}
    if args.reset_position_ids:
        options = {"reset_at_document": True, **options}
    if megatrons is None:
        return None, options
    if args.eod_mask_loss or args.reset_position_ids:
        options = {"special": {"eod": int(megatrons.eod)}, **options}
    return _PadRule(args, megatrons)._pad_token_id, options


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
        super().__init__("torch_dist", 1)
        self._options = options

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Saves, and returns when the step is complete. All ranks call it."""
        shards, common = self._main_replicas(sharded_state_dict)
        self._save(shards, common, checkpoint_dir, None)

    def async_save(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
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
        request = _request_type(async_strategy)
        shards, common = self._main_replicas(sharded_state_dict)
        copies = _copied(shards)
        lock = _ProcessLock()
        future = background.executor.submit(self._save, copies, common, checkpoint_dir, group)
        future.add_done_callback(lambda _: lock.release())
        return request(_wait_for, (lock.path,), [_Outcome(future)])

    def _main_replicas(
        self, sharded_state_dict: Any
    ) -> tuple[dict[str, list[Any]], bytes | None]:
        """The shards that this rank saves, and the contents of ``common.pt`` if it writes that."""
        shards: dict[str, list[Any]] = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )[0]
        if not _has_common_shard():
            return shards, None
        common = shards.pop(_COMMON_KEY, None)
        return shards, None if common is None else _pickled(common[0].data)

    def _save(
        self,
        shards: dict[str, list[Any]],
        common: bytes | None,
        folder: str | Path,
        group: Any,
    ) -> None:
        planner = strategies.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        save(
            strategies.mcore_to_pyt_state_dict(shards, False),
            storage_writer=_IterationWriter(folder, common, **self._options),
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

    def load(
        self,
        sharded_state_dict: Any,
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
    ) -> Any:
        """Loads the sharded part of a checkpoint. All ranks call it, unless Megatron's ``load`` has
        a ``process_group``.

        Args:
            sharded_state_dict: The requested state; its tensors are read in place.
            checkpoint_dir: The folder.
            async_strategy: Which reader Megatron 0.17 and later use for their own checkpoints.

        Returns:
            The state, with tensors and objects in place of their sharded forms.
        """
        if _is_megatrons(checkpoint_dir):
            options = _accepted(super().load, async_strategy=async_strategy)
            return super().load(sharded_state_dict, checkpoint_dir, **options)
        reader = StorageReader(checkpoint_dir)
        reader._gives_raw_bytes = True  # Megatron pickles and unpickles its objects
        wanted = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        planner = strategies.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in wanted if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                t.key: t for t in wanted if t.allow_shape_mismatch
            },
            # Since 0.19: whether the planner converts to FP8, tensor by tensor.
            **{
                name: getattr(self, name) for name in ["stream_ckpt_dequant"] if hasattr(self, name)
            },
        )
        shards, paths, names = strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        state = strategies.mcore_to_pyt_state_dict(shards, True)
        # Without collectives if some ranks may load alone. The folder has one step for all.
        is_alone = "process_group" in inspect.signature(dist_checkpointing.load).parameters
        load(state, storage_reader=reader, planner=planner, no_dist=is_alone)
        state = {
            key: strategies._unwrap_pyt_sharded_tensor(value) for key, value in state.items()
        }
        loaded = strategies._replace_sharded_keys_with_state_dict_keys(state, paths, names)
        strategies._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """Keys, types and global shapes of the tensors, as sharded tensors without data."""
        if metadata is None:
            is_megatrons = _is_megatrons(checkpoint_dir)
            reader = strategies._get_filesystem_reader if is_megatrons else StorageReader
            metadata = reader(checkpoint_dir).read_metadata()
        return super().load_tensors_metadata(checkpoint_dir, _without_strides(metadata))

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
        AttributeError: This version of Megatron-LM does not choose strategies by known names.
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

    class Installed(SaveStrategy):
        """The strategy with the options of the run, as Megatron-LM constructs it."""

        def __init__(
            self, backend: str = "torch_dist", version: int = 1, **arguments: Any
        ) -> None:
            known.check_save_arguments((backend, version), arguments)
            super().__init__(**options)

    # The names that it imports: classes since 0.17; before, functions that return their objects.
    pairs: list[dict[str, Any]] = [
        {
            "TorchDistSaveShardedStrategy": Installed,
            "TorchDistLoadShardedStrategy": LoadStrategy,
        },
        {
            "get_default_save_sharded_strategy": Installed,
            "get_default_load_sharded_strategy": lambda checkpoint_dir: LoadStrategy(),
        },
    ]
    for pair in pairs:
        if all(hasattr(module, each) for each in pair):
            vars(module).update(pair)
            return
    raise AttributeError(
        f"cannot install checkpoints in megatron-core {megatron.core.__version__}: expected "
        f"TorchDistSaveShardedStrategy or get_default_save_sharded_strategy in {name}, found "
        "neither (hint: pass SaveStrategy() and LoadStrategy() to dist_checkpointing)"
    )


class _IterationWriter(StorageWriter):
    """Writes into the folder of an iteration, which has one step, and the ``common.pt`` of a
    release that has none."""

    def __init__(self, folder: str | Path, common: bytes | None, **options: Any) -> None:
        super().__init__(folder, _step_of(folder), **options)
        self._common = common

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
        if self._common is not None:
            (folder / "common.pt").write_bytes(self._common)
            _sync(folder)
        if (folder / "common.pt").exists():
            _sync(folder / "common.pt")


_COMMON_KEY = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""The key of the state that is no tensor, which Megatron 0.19 saves as a sharded object."""


def _has_common_shard() -> bool:
    """Whether this release passes the common state to the strategy instead of ``common.pt``.

    Raises:
        ValueError: It does not read ``common.pt`` either.
    """
    if hasattr(serialization, "save_common") or hasattr(
        serialization, "get_default_save_common_strategy"
    ):
        return False
    if not hasattr(serialization, "_legacy_common_state_exists"):
        raise ValueError(
            "cannot save a checkpoint: expected a release of Megatron that reads common.pt, found "
            f"megatron-core {megatron.core.__version__} (hint: use 0.19.2)"
        )
    return True


def _without_strides(metadata: Metadata) -> Metadata:
    """The metadata without a property of torch 2.15 that Megatron 0.19 passes to ``torch.empty``,
    which refuses it."""
    entries = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and hasattr(entry.properties, "strides"):
            properties = copy.copy(entry.properties)
            vars(properties).pop("strides", None)
            entry = dataclasses.replace(entry, properties=properties)
        entries[key] = entry
    return dataclasses.replace(metadata, state_dict_metadata=entries)


def _pickled(value: Any) -> bytes:
    into = io.BytesIO()
    torch.save(value, into)
    return into.getvalue()


def _accepted(function: Any, **options: Any) -> dict[str, Any]:
    """Those of some options that a function of the installed release has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in names}


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
