"""Samples and checkpoints for Hugging Face's ``Trainer``.

`CausalLMDataset` is the data. `Trainer` replaces the class of that name: it saves steps of Feedline
and resumes from them, and ``AutoModelForCausalLM.from_pretrained`` opens them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import transformers
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers.trainer_callback import ExportableState, TrainerCallback

import feedline
from feedline import _feedline, _hf
from feedline._staging import StagesCopies
from feedline._values import decoded, encoded
from feedline.ckpt import open_folder
from feedline.dcp import StorageReader, StorageWriter
from feedline.torch import MapDataset

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_STATE = "trainer_state.json"

_log = logging.getLogger("feedline.ckpt")

_FILE_BYTES = 4 << 30
"""The most bytes of tensors in a file, except for a larger tensor."""

_REFUSED_OPTIONS = {
    "push_to_hub": "transformers would upload every step of output_dir, with its optimizer; "
    "upload the folder of one step with huggingface_hub",
    "save_on_each_node": "all ranks save one step into one output_dir, which all nodes share",
}
"""Options of ``TrainingArguments`` that steps cannot follow, and why."""

_KNOWN_OPTIONS = {
    "save_only_model",
    "save_strategy",
    "save_steps",
    "save_on_each_node",
    "save_total_limit",
    "enable_jit_checkpoint",
    "restore_callback_states_from_checkpoint",
    "resume_from_checkpoint",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
}
"""Options with ``save``, ``checkpoint`` or ``state`` in their names that are followed."""

_SAVE_STRATEGIES = {"no", "steps", "epoch", "best"}

# The label that losses of PyTorch ignore.
IGNORED = -100


class CausalLMDataset(MapDataset):
    """Samples of a causal language model: ``input_ids``, ``labels`` and ``shift_labels``.

    All are int64 of the shape ``[sequence_length]``. ``labels`` are the tokens themselves, because
    models of transformers shift them. ``shift_labels`` are the next tokens, the last one included;
    models use them unchanged, if ``remove_unused_columns=False`` keeps them. A token without
    a loss has the label -100. With ``reset_at_document=True`` there are also ``position_ids``.

    Pass to ``TrainingArguments``: ``train_sampling_strategy="sequential"``,
    ``remove_unused_columns=False`` and ``dataloader_drop_last=True``. A resumed ``Trainer`` skips
    samples by number, without reading them.

    Args:
        source: The argument of `feedline.open`, or its result.
        options: As for `feedline.open`.

    Raises:
        ValueError: A setting is out of its range, or the samples are not of a causal model.
        FileNotFoundError: There are no such files.
        CorruptError: The files do not match their formats.
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
        """The tensors of one sample under the names of transformers."""
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


class SavesSteps(_Trainer):
    """A mixin for `transformers.Trainer` or a class that is derived from it.

    >>> class Trainer(feedline.transformers.SavesSteps, trl.SFTTrainer): ...

    A step has the weights, the state of the optimizer, of the schedule, of gradient scaling, of all
    random generators of each rank, and the ``TrainerState``. It appears in ``output_dir`` as
    ``step-000000000010`` when all of it is durable. ``train(resume_from_checkpoint=True)`` resumes
    from the newest step, bit for bit; checkpoints of ``transformers`` load as before. The folder
    of the step also has ``config.json`` and the other files that ``from_pretrained`` needs.

    Of a model with adapters of PEFT, a step has the adapters and the weights that are trained, and
    not the base model, as a checkpoint of ``transformers``. ``PeftModel.from_pretrained`` opens it.

    ``save_total_limit`` is how many steps are kept. The best step and all after it are also kept. A
    step that exists is not overwritten.

    All ranks share ``output_dir``. Models are plain, compiled, in ``DistributedDataParallel``, or
    sharded by FSDP2. Other ways to shard them are refused. For a save, the ranks gather a sharded
    model tensor by tensor, and each of them writes its share as complete tensors.

    Args:
        args: As for the class that is derived from.
        async_save: Whether steps are written in the background, from a copy in memory.
        kwargs: As for the class that is derived from.

    Raises:
        StepExistsError: ``output_dir`` has steps after the one to start from.
        ValueError: The model is sharded in a way that is not supported; an option is not, such as
            ``push_to_hub``; or the optimizer or the schedule has a value that cannot be stored.
            All are raised before the run begins, except for values that the first step creates.
        OSError: The store failed, or is full.

    Errors of a save are wrapped in DCP's ``CheckpointException``, with the rank that raised them.
    Errors of a save in the background are raised by the next save or at the end of ``train``.
    """

    def __init__(self, *args: Any, async_save: bool = False, **kwargs: Any) -> None:
        self._is_async = async_save
        self._background: ThreadPoolExecutor | None = None
        self._group: Any = None
        self._saving: Future[None] | None = None
        self._first_step: int | None = None
        self._saved_step: int | None = None
        self._adapters: frozenset[str] | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_ChecksState(self))

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As in `transformers`. ``True`` is the newest step of ``output_dir``."""
        _check_support(self)
        folder = self.args.output_dir
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(folder) or True
        first = -1
        if _is_step(resume_from_checkpoint):
            reader = StorageReader(resume_from_checkpoint)
            first = reader.step
            if self.args.should_save:
                # A run that was killed after its step and before these files has not written them.
                self._complete_step(reader)
            self.accelerator.wait_for_everyone()
        if self.args.save_strategy != "no":
            _check_later_steps(folder, first)
        self._first_step = first if first in _steps(folder) else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._finish_save()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # With `auto_find_batch_size`, this is called again after it has run out of memory.
        self._finish_save()
        self._saved_step = self._first_step
        self._adapters = _hf.adapter_names(self.model)
        return super()._inner_training_loop(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        folder = self._get_output_dir(trial=trial)
        step = self.state.global_step
        if step == self._saved_step:
            return
        self._finish_save()
        # If the best step was not saved, the best saved step remains the one to load.
        best = self.state.best_global_step
        if best and (best == step or best in _steps(folder)):
            self.state.best_model_checkpoint = _step_folder(folder, best)
        for exported in (*self.callback_handler.callbacks, self.control):
            if isinstance(exported, ExportableState):
                states = self.state.stateful_callbacks
                name = type(exported).__name__
                if isinstance(states[name], list):
                    states[name].append(exported.state())
                else:
                    states[name] = exported.state()
        weights = _hf.weights_of(self.model, self._adapters)
        # A file has complete tensors only, which transformers reads.
        limit = max(_FILE_BYTES, _hf.largest_bytes(weights))
        keep = self._keep_last(folder)
        writer = StorageWriter(folder, step, keep_last=keep, shard_bytes_max=limit)
        state = self._step_state(weights)
        files = {}
        if self.args.should_save:
            files = {_STATE: self._state_text().encode()}
            files.update(_hf.model_files(self.model, state["model"]))
        self._start_save(writer, state, files)
        self._saved_step = step

    def _start_save(
        self, writer: StorageWriter, state: dict[str, Any], files: dict[str, bytes]
    ) -> None:
        if not self._is_async:
            self._save_step(writer, state, files, None)
            return
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "feedline-save")
            if torch.distributed.is_initialized():
                # Collectives of a thread need their own group.
                timeout = timedelta(seconds=writer._timeout)
                self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        copied = StagesCopies().stage(state)
        self._saving = self._background.submit(
            self._save_step, writer, copied, files, self._group
        )

    def _save_step(
        self, writer: StorageWriter, state: dict[str, Any], files: dict[str, bytes], group: Any
    ) -> None:
        save(state, storage_writer=writer, process_group=group)
        if files:
            _hf.complete(Path(writer.checkpoint_id), {**files, **self._processing_files()})

    def _complete_step(self, reader: StorageReader) -> None:
        """Writes the files of a step that are missing."""
        state = _common(reader)["state"]
        text = state if isinstance(state, str) else json.dumps(state, indent=2)
        names = _hf.adapter_names(self.model) or ()
        weights = _hf.read_weights(reader._step, names)
        files = {_STATE: text.encode(), **_hf.model_files(self.model, weights)}
        _hf.complete(Path(reader.checkpoint_id), {**files, **self._processing_files()})

    def _processing_files(self) -> dict[str, bytes]:
        """The files of the tokenizer, or of what else makes inputs."""
        made = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return {} if made is None else _hf.saved_files(made)

    def _state_text(self) -> str:
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)

    def _finish_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _keep_last(self, folder: str) -> int | None:
        limit = int(self.args.save_total_limit or 0)
        if limit <= 0:
            return None
        found = re.search(r"step-(\d+)/?$", self.state.best_model_checkpoint or "")
        if found is None:
            return limit
        best = int(found[1])
        return max(limit, 1 + len([step for step in _steps(folder) if step >= best]))

    def _step_state(self, weights: dict[str, Any]) -> dict[str, Any]:
        """All of this rank's state: tensors, and the rest as JSON."""
        # In all ranks, so that a value that cannot be stored is an error in all of them.
        common = _json_of(self._common_state(), "trainer")
        # PEFT saves adapters from one rank; they are small.
        owner = None if self._adapters is None else 0
        state: dict[str, Any] = {"model": _hf.gathered(weights, owner)}
        if not self.args.save_only_model:
            state["optim"] = {"state": self._named_optimizer_state()}
            rank = str(self.args.process_index)
            state["rng"] = {rank: _json_of(_random_states(), "rng")}
        if self.args.should_save:
            state["trainer"] = common
        return state

    def _named_optimizer_state(self) -> dict[str, Any]:
        """The state of each parameter by its name."""
        names = self._parameters_by_number()
        return {names[n]: v for n, v in self.optimizer.state_dict()["state"].items()}

    def _common_state(self) -> dict[str, Any]:
        """The values that all ranks share and that are no weights."""
        # As text: values that callbacks log are stored as `transformers` stores them.
        common: dict[str, Any] = {"state": self._state_text()}
        if self.args.save_only_model:
            return common
        names = self._parameters_by_number()
        common["param_groups"] = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        common["scheduler"] = self.lr_scheduler.state_dict()
        if getattr(self.accelerator, "scaler", None) is not None:
            common["scaler"] = self.accelerator.scaler.state_dict()
        return common

    def _check_state(self) -> None:
        """Raises for what the first save would refuse, before the run begins."""
        if self.args.save_strategy == "no":
            return
        _json_of(self._common_state(), "trainer")
        if self._adapters is None:
            if self.args.should_save and not _hf.has_config(self.model):
                _log.warning(
                    "steps of %s have no config.json: it is not a model of transformers, so "
                    "from_pretrained does not open them",
                    type(_hf.bare_model(self.model)).__name__,
                )
            return
        weights = _hf.gathered(_hf.weights_of(self.model, self._adapters), 0)
        with _on_all_ranks():
            if self.args.should_save:
                _hf.model_files(self.model, weights)

    def _check_optimizer_state(self) -> None:
        """Raises for what the first step of an optimizer has created and that cannot be saved."""
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            for name, values in self._named_optimizer_state().items():
                for key, value in values.items():
                    if not isinstance(value, torch.Tensor):
                        _json_of(value, f"optim.state.{name}.{key}")

    def _parameters_by_number(self) -> list[str]:
        """The names of parameters, by their numbers in the state of the optimizer."""
        names = _hf.parameter_names(self.model)
        ids = (id(each) for group in self.optimizer.param_groups for each in group["params"])
        numbers = enumerate(dict.fromkeys(ids))
        return [names.get(parameter, f"parameter.{number}") for number, parameter in numbers]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_step(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_weights(self, model: Any, step: str) -> None:
        """Reads a step into the tensors of a model."""
        weights = _hf.weights_of(model, _hf.adapter_names(model))
        load({"model": weights}, storage_reader=StorageReader(step))
        _hf.load_weights(model, weights)

    def _load_best_model(self) -> None:
        self._finish_save()
        if _is_step(self.state.best_model_checkpoint):
            self._load_weights(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not _is_step(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        reader = StorageReader(checkpoint)
        common = _common(reader)
        if "param_groups" not in common:
            return  # saved with save_only_model
        names = self._parameters_by_number()
        numbers = {name: number for number, name in enumerate(names)}
        saved = [name for group in common["param_groups"] for name in group["params"]]
        if sorted(saved) != sorted(names):
            others = sorted(set(saved) ^ set(names))
            raise ValueError(
                f"cannot load the optimizer of {checkpoint}: expected the parameters of this "
                f"model, found others: {', '.join(others[:5])}"
            )
        by_id = _hf.parameter_names(self.model)
        parameters = {by_id[id(each)]: each for each in self.model.parameters()}
        state = _optimizer_state(reader, parameters)
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in _placed_as(self.optimizer.param_groups, common["param_groups"])
        ]
        self.optimizer.load_state_dict(
            {"state": {numbers[n]: v for n, v in state.items()}, "param_groups": groups}
        )
        self.lr_scheduler.load_state_dict(common["scheduler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not _is_step(checkpoint):
            super()._load_scaler(checkpoint)
            return
        common = _common(StorageReader(checkpoint))
        if "scaler" in common and getattr(self.accelerator, "scaler", None) is not None:
            self.accelerator.scaler.load_state_dict(common["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not _is_step(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        # A rank that the saving run did not have keeps its own random state.
        found = StorageReader(checkpoint)._values.get(f"rng.{self.args.process_index}")
        if found is not None:
            _restore_random_states(decoded(json.loads(found), "rng", False))


class _ChecksState(TrainerCallback):
    """Checks that the state of a trainer can be saved, before it trains."""

    def __init__(self, trainer: SavesSteps) -> None:
        self._trainer = trainer
        self._is_new = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._is_new = True
        self._trainer._check_state()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._is_new:
            self._is_new = False
            self._trainer._check_optimizer_state()


class Trainer(SavesSteps, transformers.Trainer):
    """`transformers.Trainer` with the checkpoints of `SavesSteps`."""


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The folder of the newest complete step, like the function of ``transformers.trainer_utils``.

    Returns:
        None: There is no step, or no such folder.
    """
    steps = _steps(folder)
    return _step_folder(folder, steps[-1]) if steps else None


def save_config(model: Any, folder: str | os.PathLike[str]) -> None:
    """Writes ``config.json`` into the folder of a step, so that ``from_pretrained`` opens it.

    `Trainer` does that itself. Call it for steps of `feedline.dcp` whose weights are below
    ``"model"`` or at the top, with the names of ``transformers``. Weights that the ranks have saved
    in pieces are also written complete, beside them: that reads and writes all weights again. Of a
    model with adapters of PEFT, the files are those that PEFT opens.

    Args:
        model: The model, a ``PreTrainedModel`` or a ``PeftModel``. Only its config is used.
        folder: The folder of the step.

    Raises:
        FileNotFoundError: There is no such step.
        CorruptError: A byte of a weight differs from what was saved.
    """
    step = feedline.ckpt.open(folder)
    names = _hf.adapter_names(model)
    if names is None:
        _hf.join_weights(step)
    files = _hf.model_files(model, _hf.read_weights(step, names or ()))
    _hf.complete(Path(step.folder), files)


def _check_support(trainer: Any) -> None:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    is_fsdp1 = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2
    unsupported = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP1": is_fsdp1,
        "XLA": trainer.is_fsdp_xla_enabled,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise ValueError(
                f"cannot save steps of a model in {name}: expected a plain model, "
                "DistributedDataParallel or FSDP2 (hint: transformers.Trainer saves it)"
            )
    _check_options(trainer.args)


def _check_options(arguments: Any) -> None:
    """Raises for options that steps do not follow, and for those of a newer release."""
    for option, hint in _REFUSED_OPTIONS.items():
        if getattr(arguments, option):
            raise ValueError(f"cannot use {option}: expected False, found True (hint: {hint})")
    strategy = str(getattr(arguments.save_strategy, "value", arguments.save_strategy))
    if strategy not in _SAVE_STRATEGIES:
        raise ValueError(
            f"cannot use save_strategy: expected one of {', '.join(sorted(_SAVE_STRATEGIES))}, "
            f"found {strategy}"
        )
    for field in dataclasses.fields(transformers.TrainingArguments):
        is_of_saves = re.search("save|checkpoint|state", field.name) is not None
        if is_of_saves and field.name not in _KNOWN_OPTIONS:
            if (value := getattr(arguments, field.name)) != field.default:
                raise ValueError(
                    f"cannot use {field.name}: expected its default, since this option is newer "
                    f"than this version of Feedline, found {value}"
                )


def _check_later_steps(folder: str, first: int) -> None:
    later = [step for step in _steps(folder) if step > first]
    if later:
        raise feedline.errors.StepExistsError(
            f"cannot train into {folder}: expected no step after {max(first, 0)}, found "
            f"{later[-1]} (hint: resume_from_checkpoint=True, or another output_dir)"
        )


def _steps(folder: str | os.PathLike[str]) -> list[int]:
    return open_folder(folder).steps() if os.path.isdir(folder) else []


def _step_folder(folder: str | os.PathLike[str], step: int) -> str:
    return os.path.join(folder, f"step-{step:012}")


def _is_step(folder: Any) -> TypeGuard[str]:
    return isinstance(folder, str) and _feedline.split_step(folder) is not None


@contextlib.contextmanager
def _on_all_ranks() -> Iterator[None]:
    """Raises the error of rank 0 in all ranks, so that none of them waits for it."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    if torch.distributed.is_initialized():
        texts = [None if error is None else str(error)]
        torch.distributed.broadcast_object_list(texts, 0)
        error = error or (None if texts[0] is None else ValueError(texts[0]))
    if error is not None:
        raise error


def _json_of(value: Any, name: str) -> str:
    """A value as JSON.

    Raises:
        ValueError: JSON cannot store it.
    """
    try:
        return json.dumps(encoded(_on_host(value), name, False))
    except ValueError as error:
        reason, _, _ = str(error).partition(" (hint:")
        raise ValueError(
            f"{reason} (hint: use such a value instead, or transformers.Trainer)"
        ) from None


def _on_host(value: Any) -> Any:
    """A value with its tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_host(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_host(inner) for inner in value)
    return value


def _placed_as(now: Any, saved: Any) -> Any:
    """A saved value with its tensors where those of a current value are."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(now.device)
    if type(now) is dict and type(saved) is dict:
        return {key: _placed_as(now.get(key), inner) for key, inner in saved.items()}
    if type(now) in (list, tuple) and type(saved) is type(now) and len(saved) == len(now):
        return type(saved)(map(_placed_as, now, saved))
    return saved


def _common(reader: StorageReader) -> dict[str, Any]:
    """The values that all ranks share and that are no tensors."""
    if "trainer" not in reader._values:
        raise ValueError(
            f"cannot resume from {reader.checkpoint_id}: expected a step of a Trainer, found "
            "another"
        )
    common: dict[str, Any] = decoded(json.loads(reader._values["trainer"]), "trainer", False)
    return common


def _optimizer_state(
    reader: StorageReader, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Any]:
    """The state of each parameter by its name, as it was saved."""
    metadata = reader.read_metadata()
    paths = {
        name: path
        for name, path in (metadata.planner_data or {}).items()
        if path[:2] == ("optim", "state")
    }
    flat: dict[str, Any] = {}
    for name, path in paths.items():
        entry = metadata.state_dict_metadata[name]
        flat[name] = None
        if isinstance(entry, TensorStorageMetadata):
            flat[name] = _template(entry, parameters.get(path[2]))
    load(flat, storage_reader=reader)
    nested: dict[str, Any] = unflatten_state_dict(flat, paths)
    state: dict[str, Any] = nested.get("optim", {}).get("state", {})
    return state


def _template(entry: TensorStorageMetadata, parameter: torch.nn.Parameter | None) -> torch.Tensor:
    """Memory for a tensor of the optimizer, sharded as its parameter is."""
    dtype = entry.properties.dtype
    is_sharded = parameter is not None and type(parameter.data).__name__ == "DTensor"
    if is_sharded and parameter is not None and parameter.shape == entry.size:
        return torch.empty_like(parameter.data, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _random_states() -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state().numpy(),
    }
    if torch.cuda.is_available():
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(torch.from_numpy(states["cpu"]))
    devices = [torch.from_numpy(state) for state in states.get("cuda", ())]
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)
