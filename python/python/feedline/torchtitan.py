"""The data loader and the checkpoints of torchtitan's trainer."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)
from torchtitan.components import checkpoint
from torchtitan.components.checkpoint import MODEL, AsyncMode
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

import feedline
from feedline import _feedline
from feedline._staging import StagesCopies
from feedline.ckpt import open_folder
from feedline.dcp import StorageReader, StorageWriter, step_url
from feedline.torch import Loader, tensors

__all__ = ["CheckpointManager", "DataLoader"]


# Fields of torchtitan's configs that are followed or refused. `_refuse_unknown` refuses others.
DATA_FIELDS = ("dataset", "dataset_path")
CHECKPOINT_FIELDS = (
    "async_mode",
    "create_seed_checkpoint",
    "enable",
    "enable_first_step_checkpoint",
    "exclude_from_loading",
    "export_dtype",
    "folder",
    "initial_load_in_hf",
    "initial_load_in_hf_quantized",
    "initial_load_model_only",
    "initial_load_path",
    "interval",
    "keep_latest_k",
    "last_save_in_hf",
    "last_save_model_only",
    "load_only",
    "load_step",
)
# Documents whose last tokens are compared with the tokenizer's `eos_id`.
DOCUMENTS_CHECKED_MAX = 16
WITHOUT_DOCUMENTS = "reset_at_document=False, mask_eod_loss=False ignore documents"
# Numpy's names for the type codes of Megatron's `.idx`. Only DeepSpeed's 6 is opened: uint16.
INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 8: "<u2"}


class DataLoader(BaseDataLoader):
    """Feedline's batches as torchtitan takes them: ``({"input", "positions"}, labels)``.

    All are int64 of the shape ``[local_batch_size, seq_len]``. A token without a loss has the label
    -100. In a config: ``dataloader=feedline.torchtitan.DataLoader.Config(dataset_path="corpus")``.

    Documents have the meaning of torchtitan's own loaders: positions are 0 at the start of a sample
    and of a document, from which models make their attention masks, and no label is the first
    token of the next document. Samples are Megatron's, so ``input`` contains the tokens that end
    documents, which torchtitan omits.

    The state is part of torchtitan's checkpoints and loads into any number of ranks. A second loop
    continues where the first ended; at the end of the samples it is empty, with a warning, as that
    of torchtitan's own loaders.

    Raises:
        ValueError: There is no ``dataset_path``, a setting is out of its range or not known, the
            samples are too few for a batch, or no document ends with the tokenizer's ``eos_id``.
        FileNotFoundError: There are no such files.
        CorruptError: The files do not match their formats.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``dataset_path`` is the prefix of a corpus, or the TOML of a run, as for
        `feedline.open`. The other fields are arguments of that function, except ``infinite``."""

        num_samples: int | None = None
        """Samples that the order is built for. Default: one epoch."""
        seed: int | None = None
        """Seed of the order. Default: 1234."""
        split: str | None = None
        """Shares of the documents for training, validation and test. Default: all for training."""
        reset_at_document: bool | None = None
        """Whether positions restart after each token that ends a document: the tokenizer's
        ``eos_id``. Default: true; with a TOML, that of the run."""
        mask_eod_loss: bool | None = None
        """Whether that token has no loss. Default: true; with a TOML, that of the run."""
        infinite: bool = False
        """Whether the samples start again when they end; otherwise the run does, and a rest that is
        too short for a batch of every rank is dropped. Sample `i` is then that of the number
        ``i % num_samples``, also within a batch and after a resume with other ranks. torchtitan's
        validator sets it."""
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
        snapshot_every_n_steps: int | None = None,
        **unknown: Any,
    ) -> None:
        # The state is exact after every batch, so snapshots of it have no meaning here.
        del snapshot_every_n_steps
        for name in unknown:
            raise ValueError(
                f"cannot build a loader: expected torchtitan's arguments, found {name!r} (hint: "
                "this version of feedline does not know it)"
            )
        _refuse_unknown(config, BaseDataLoader.Config, DATA_FIELDS)
        dataset = _open(config, tokenizer, seq_len)
        step_samples = local_batch_size * dp_world_size
        count = len(dataset)
        if count == 0 or (count < step_samples and not config.infinite):
            raise ValueError(
                f"cannot load batches: expected at least {step_samples} samples, a batch of every "
                f"rank, found {count} (hint: infinite=True repeats the samples)"
            )
        self.loader = Loader(
            dataset,
            pin_memory=config.pin_memory,
            micro_batch_size=local_batch_size,
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
        )
        self._infinite = config.infinite
        self._pin_memory = config.pin_memory
        self._step_samples = step_samples
        # Of a batch of all ranks, the samples of this one.
        self._rows = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        # Samples of completed passes: a multiple of their number.
        self._passed = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while (batch := self._next()) is not None:
            labels = batch["labels"].masked_fill_(batch["loss_mask"] == 0, IGNORE_INDEX)
            yield {"input": batch["tokens"], "positions": batch["position_ids"]}, labels
        consumed, count = self.samples_consumed, len(self.loader.dataset)
        logger.warning(
            f"feedline: the samples have ended, after {consumed} of {count}; later loops are empty "
            "(infinite=True starts again)"
        )

    def _next(self) -> dict[str, torch.Tensor] | None:
        batch = next(self.loader, None)
        if batch is not None or not self._infinite:
            return batch
        # The batch that contains the end. State is set after the read, which may raise an error.
        dataset, consumed = self.loader.dataset, self.samples_consumed
        arrays = dataset.read([(consumed + row) % len(dataset) for row in self._rows])
        batch = tensors(arrays, pin_memory=self._pin_memory)
        self._continue(self.loader.state_dict(), consumed + self._step_samples)
        return batch

    def _continue(self, state: dict[str, Any], consumed: int) -> None:
        place = consumed % len(self.loader.dataset)
        self.loader.load_state_dict({**state, "samples_consumed": place})
        self._passed = consumed - place

    @property
    def samples_consumed(self) -> int:
        """Samples that all ranks together have consumed, in all passes."""
        return self._passed + self.loader.samples_consumed

    def state_dict(self) -> dict[str, Any]:
        """The state of `feedline.Loader`, flat: distributed checkpoints load key by key.
        ``samples_consumed`` counts all passes, so it may exceed the number of samples."""
        state = self.loader.state_dict()
        data = json.dumps(state["data"])
        return {**state, "samples_consumed": self.samples_consumed, "data": data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state, of any number of ranks. An empty one is the start.

        Raises:
            OtherDataError: It is of other data; the text names what differs.
            ValueError: It is beyond the end of the samples, and ``infinite`` is not set.
        """
        if not state_dict:
            return
        state = {**state_dict, "data": json.loads(state_dict["data"])}
        count, consumed = len(self.loader.dataset), state.get("samples_consumed")
        if not isinstance(consumed, int) or consumed <= count:
            self.loader.load_state_dict(state)
            self._passed = 0
            return
        if not self._infinite and state.get("fingerprint") == self.loader.dataset.fingerprint:
            raise ValueError(
                f"cannot load the state of a loader: expected at most {count} samples, found "
                f"{consumed} (hint: it was saved with infinite=True)"
            )
        self._continue(state, consumed)


def _open(config: DataLoader.Config, tokenizer: Any, seq_len: int) -> feedline.Dataset:
    """The samples of a config, with documents as torchtitan's own loaders give them."""
    path = config.dataset_path
    if config.dataset:
        raise ValueError(
            f"cannot open samples: expected no dataset, found {config.dataset!r} (hint: "
            "dataset_path is the prefix of a corpus or the TOML of a run)"
        )
    if not path:
        raise ValueError("cannot open samples: expected dataset_path, found none")
    default = None if path.endswith(".toml") else True
    flags = {"reset_at_document": config.reset_at_document, "mask_eod_loss": config.mask_eod_loss}
    flags = {name: default if flag is None else flag for name, flag in flags.items()}
    documents: dict[str, Any] = {name: flag for name, flag in flags.items() if flag is not None}
    if any(documents.values()):
        eos_id = getattr(tokenizer, "eos_id", None)
        if eos_id is None:
            raise ValueError(
                "cannot find the ends of documents: expected a tokenizer with an eos_id, found "
                f"none (hint: {WITHOUT_DOCUMENTS})"
            )
        documents["special"] = {"eod": eos_id}
    dataset = feedline.open(
        path,
        sequence_length=seq_len,
        num_samples=config.num_samples,
        random_seed=config.seed,
        split=config.split,
        path_to_cache=config.path_to_cache,
        **documents,
    )
    if (objective := dataset.identity["objective"]) != "lm":
        raise ValueError(f"cannot load batches: expected objective 'lm', found {objective!r}")
    if "special" in documents:
        _check_ends(path, documents["special"]["eod"])
    return dataset


def _check_ends(prefix: str, eos_id: int) -> None:
    """Refuses a tokenizer of another corpus: no position would restart, and none would notice.

    Only local files of Megatron's format are checked. Their index is read for the first documents.
    """
    path = _feedline.local_path(prefix)
    index = f"{path}.idx"
    if path is None or not os.path.isfile(index):
        return
    with open(index, "rb") as file:
        header = file.read(34)
        if header[:9] != b"MMIDIDX\0\0" or header[17] not in INDEX_DTYPES:
            return
        sequences, _ = struct.unpack("<QQ", header[18:])
        file.seek(34 + 12 * sequences)
        ends = np.fromfile(file, "<i8", DOCUMENTS_CHECKED_MAX + 1)[1:]
        file.seek(34)
        lengths = np.fromfile(file, "<i4", int(ends.max(initial=0)))
    last = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[ends] - 1
    last = last[last >= 0]
    if len(last) == 0:
        return
    found = np.memmap(f"{path}.bin", INDEX_DTYPES[header[17]], "r")[last]
    if not (found == eos_id).any():
        raise ValueError(
            f"cannot find the ends of documents: expected the tokenizer's eos_id {eos_id}, found "
            f"{found[0]} at the end of the first document of {prefix} (hint: preprocess with "
            f"--append-eod and this tokenizer; {WITHOUT_DOCUMENTS})"
        )


def _refuse_unknown(config: Any, stock: type, known: Iterable[str]) -> None:
    """Refuses a field of a newer torchtitan, which may change data or a save, if it is set."""
    for field in dataclasses.fields(stock):
        if field.name in known:
            continue
        value = getattr(config, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if value != default:
            raise ValueError(
                f"cannot use {field.name} of {stock.__qualname__}: expected its default, found "
                f"{value!r} (hint: this version of feedline does not know this field)"
            )


class CheckpointManager(checkpoint.CheckpointManager):
    """torchtitan's ``CheckpointManager``, whose checkpoints are Feedline's steps.

    In a config: ``checkpoint=feedline.torchtitan.CheckpointManager.Config(enable=True)``. All
    fields have the meaning of torchtitan. A step is durable and complete before it is visible, its
    bytes have checksums, and it loads into any number of ranks. ``feedline ckpt`` reads the
    folder, which may be a path or ``s3://bucket/prefix``. Differences to torchtitan's own manager:

    - A step that exists is not overwritten. So a run that saves cannot start at a ``load_step``
      before the newest step.
    - ``async_mode="async_with_pinned_mem"`` saves in another process. ``save`` returns when the
      state is copied, also without a GPU.
    - ``keep_latest_k`` counts complete steps and is applied after a step is complete. Only steps
      are deleted.
    - ``close`` waits for a save in the background and raises its error.

    A folder with torchtitan's own distributed checkpoints can be read, too: a run continues from
    the newest of both kinds. Hugging Face checkpoints are read and written by torchtitan itself:
    ``last_save_in_hf`` writes ``step-N`` next to the steps.

    Raises:
        ValueError: The folder is in a store that Feedline does not have, ``load_step`` is before
            the newest step, or a value in the state cannot be stored.
        FileNotFoundError: ``load_step`` or ``initial_load_path`` does not exist.
        CorruptError: A byte differs from what was saved.
        StepExistsError: The step exists already.

    While ranks save or load together, errors are wrapped in `dcp.api.CheckpointException`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(checkpoint.CheckpointManager.Config):
        """The fields of torchtitan's manager, and two more."""

        allow_pickle: bool = False
        """Whether values that JSON cannot store are pickled, and pickles are loaded."""
        timeout: float = 1800
        """Seconds after which a save that has not ended fails."""

    folder: str

    def __init__(self, config: Config, *, base_folder: str = "", **parts: Any) -> None:
        if config.enable:
            # Invalid arguments raise before torchtitan starts its threads.
            open_folder(filesystem.join(base_folder, config.folder))
            _refuse_unknown(config, checkpoint.CheckpointManager.Config, CHECKPOINT_FIELDS)
            _checkpointer_type(config.async_mode)
        super().__init__(config, base_folder=base_folder, **parts)
        self._allow_pickle = config.allow_pickle
        self._timeout = config.timeout
        if self.enable and self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            # torchtitan would create a stager that needs a GPU; the writer copies the state itself.
            self.stager = StagesCopies()

    def _close(self) -> None:
        # Also called for a manager whose constructor failed; the error is raised once.
        saving = getattr(self, "save_future", None)
        self.save_future = None
        try:
            if saving is not None:
                saving.result()
        finally:
            super()._close()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Saves a state as the step of ``checkpoint_id``.

        Args:
            state_dict: Weights and other states under their names.
            checkpoint_id: The result of `_create_checkpoint_id`.
            async_mode: Whether the save runs here, in a thread, or in another process.
            enable_garbage_collection: Whether garbage is collected after it.
            to_hf: Whether to write a Hugging Face checkpoint instead of a step.

        Returns:
            None, or a future that completes with the step.
        """
        folder, step = _split(checkpoint_id)
        if to_hf:
            # Under the name of a step, the folder would be taken for a damaged step.
            stock_id = super()._create_checkpoint_id(step, folder)
            return super().dcp_save(  # type: ignore[no-any-return]
                state_dict, stock_id, async_mode, enable_garbage_collection, to_hf
            )
        writer = StorageWriter(
            folder,
            step,
            allow_pickle=self._allow_pickle,
            timeout=self._timeout,
            keep_last=self.keep_latest_k or None,
        )
        result = self._saved(state_dict, writer, async_mode)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def _saved(
        self, state_dict: dict[str, Any], writer: StorageWriter, async_mode: AsyncMode
    ) -> Future[Any] | AsyncSaveResponse | None:
        with torch.no_grad():
            kind = _checkpointer_type(async_mode)
            if kind is None:
                save(state_dict, storage_writer=writer)
                return None
            saved = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=kind,
            )
        if kind == AsyncCheckpointerType.THREAD or isinstance(saved, AsyncSaveResponse):
            return saved
        staged: Future[None] = Future()
        staged.set_result(None)
        return AsyncSaveResponse(staging_completion=staged, upload_completion=saved)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Loads a checkpoint into a state, and the weights of the state into the model.

        Args:
            state_dict: The state to be filled.
            checkpoint_id: A step, a folder of steps for its newest, or a checkpoint that torchtitan
                reads itself.
            from_hf: Whether it is a Hugging Face checkpoint.
            from_quantized: Whether that checkpoint is quantized.
        """
        if from_hf or _is_stock(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = StorageReader(checkpoint_id, allow_pickle=self._allow_pickle)
        load(state_dict, storage_reader=reader)
        if MODEL in self.states:
            # The weights are flat in the state, so DCP does not load them into the model.
            self.states[MODEL].load_state_dict(state_dict)

    @structured_logger.log_trace_span("checkpoint_load")  # type: ignore[untyped-decorator]
    def _load(self, step: int = -1) -> bool:
        newest = self._find_load_step()
        if -1 < step < newest and not self.load_only:
            raise ValueError(
                f"cannot continue from step {step} of {self.folder}: expected no later step, found "
                f"step {newest} (hint: move the later steps away, or set checkpoint.load_only)"
            )
        found = newest if step == -1 else step
        if found != -1:
            checkpoint_id, model_only = self._existing_id(found), found == 0
        elif self._has_initial_step():
            checkpoint_id, model_only = self.initial_load_path, self.initial_load_model_only
        else:
            return self._load_without_steps()
        logger.info(f"Loading the checkpoint from {checkpoint_id}.")
        with torch.no_grad():
            self.dcp_load(self._states_to_load(model_only), checkpoint_id, False, False)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _load_without_steps(self) -> bool:
        """The initial load by torchtitan, without its own search for steps."""
        folder, self.folder = self.folder, ""
        try:
            return bool(super()._load())
        finally:
            self.folder = folder

    def _has_initial_step(self) -> bool:
        path = self.initial_load_path
        if not path or self.initial_load_in_hf or _is_stock(path):
            return False
        # If nothing exists, torchtitan reports it with the name of the setting.
        return _is_url(path) or os.path.isdir(path)

    def _find_load_step(self, folder: str = "") -> int:
        folder = folder or self.folder
        newest = open_folder(folder).open(None)
        return max(-1 if newest is None else newest.step, _newest_stock_step(folder))

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return step_url(folder or self.folder, step)

    def _existing_id(self, step: int) -> str:
        """The step, or torchtitan's own checkpoint of this number if there is no such step."""
        stock_id: str = super()._create_checkpoint_id(step)
        checkpoint_id = self._create_checkpoint_id(step)
        is_stock = _is_stock(stock_id) and not os.path.isdir(checkpoint_id)
        return stock_id if is_stock else checkpoint_id

    def _purge_stale_checkpoints(self) -> None:
        """Does nothing: each save deletes old steps when its own is complete."""


def _checkpointer_type(async_mode: str) -> AsyncCheckpointerType | None:
    """Where DCP saves in the background, if it does."""
    types = {
        AsyncMode.DISABLED.value: None,
        AsyncMode.ASYNC.value: AsyncCheckpointerType.THREAD,
        AsyncMode.ASYNC_WITH_PINNED_MEM.value: AsyncCheckpointerType.PROCESS,
    }
    mode = async_mode.value if isinstance(async_mode, AsyncMode) else async_mode
    if mode not in types:
        raise ValueError(
            f"cannot save checkpoints: expected async_mode {', '.join(types)}, found {mode!r} "
            "(hint: this version of feedline does not know this mode)"
        )
    return types[mode]


def _split(checkpoint_id: str) -> tuple[str, int]:
    split = _feedline.split_step(checkpoint_id)
    if split is None:
        raise ValueError(
            f"cannot save {checkpoint_id}: expected FOLDER/step- and 12 digits (hint: ids are what "
            "_create_checkpoint_id returns)"
        )
    return split


def _is_url(path: str) -> bool:
    return path.startswith(("s3:", "file:"))


def _is_stock(path: str) -> bool:
    """Whether torchtitan's own manager reads it: a distributed checkpoint of PyTorch, or in a
    store that Feedline does not support."""
    if _is_url(path):
        return False
    return filesystem.is_remote(path) or os.path.isfile(os.path.join(path, ".metadata"))


def _newest_stock_step(folder: str) -> int:
    """The newest of torchtitan's own distributed checkpoints in a folder, or -1."""
    if _is_url(folder) or not os.path.isdir(folder):
        return -1
    found = [re.fullmatch(r"step-(\d+)", name) for name in os.listdir(folder)]
    steps = [
        int(match[1]) for match in found if match and _is_stock(os.path.join(folder, match[0]))
    ]
    return max(steps, default=-1)
