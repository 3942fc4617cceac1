"""What becomes of each option of Megatron's data, so that an unknown one is refused by its name.

`CONFIG_FIELDS` has the fields of ``GPTDatasetConfig``, and `ARGUMENTS` the arguments of Megatron-LM
that reach its data. Tests compare both with the installed release. `check_config` and
`check_arguments` refuse what a run must not ignore.
"""

from __future__ import annotations

import argparse
import dataclasses
import struct
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import megatron.core

from feedline import _feedline

MID_LEVEL_SURPLUS = 0.005
"""Megatron's default, which is a constant of Feedline's blends."""

_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Start of an ``.idx``: magic, version, code of the token type, sequences, document boundaries."""


class Fate(Enum):
    """What becomes of an option."""

    FOLLOWED = "Feedline's samples follow it"
    MEGATRON = "Megatron's own code follows it, before or instead of Feedline"
    NO_EFFECT = "it changes no sample"
    REFUSED = "it is refused by its name"


def _table(**names: str) -> dict[str, Fate]:
    return {name: Fate[fate] for fate, each in names.items() for name in each.split()}


CONFIG_FIELDS = _table(
    FOLLOWED="""
        allow_ambiguous_pad_tokens create_attention_mask eod_mask_loss path_to_cache random_seed
        reset_attention_mask reset_position_ids sequence_length split split_matrix tokenizer
    """,
    MEGATRON="""
        add_extra_token_to_sequence blend blend_per_split drop_last_partial_validation_sequence
        full_validation inter_document_masking mid_level_dataset_surplus mock
        multiple_validation_sets
    """,
    # Of these, Megatron's SFT dataset reads the sizes of parallel groups. `check_sequences`
    # compares `sequences_per_dataset` and `token_dtype_code` with the file.
    NO_EFFECT="""
        context_parallel_size data_parallel_size defer_npy_index_mmap fast_cache_load
        hybrid_context_parallel mmap_bin_files num_dataset_builder_threads
        object_storage_cache_path sequence_parallel_size sequences_per_dataset token_dtype_code
    """,
)
"""What becomes of the fields of ``GPTDatasetConfig`` in `feedline.megatron.GPTDataset`."""

ARGUMENTS = _table(
    FOLLOWED="""
        allow_ambiguous_pad_tokens consumed_train_samples consumed_valid_samples data_args_path
        data_cache_path data_path eod_mask_loss eval_micro_batch_size global_batch_size iteration
        micro_batch_size per_split_data_args_path phase_transition_iterations reset_position_ids
        seed seq_length skip_train split test_data_path train_data_path valid_data_path
    """,
    # Megatron counts the samples of each part, which it passes to the provider.
    MEGATRON="""
        do_test do_train do_valid eval_global_batch_size eval_interval eval_iters perform_rl_step
        start_eval_at_iter train_iters train_samples
    """,
    # Of caches and threads; of T5 and BERT; of `--fim-data` and of `--dataloader-type cyclic`.
    NO_EFFECT="""
        dataloader_defer_npy_index_mmap dataloader_fast_cache_load exit_signal exit_signal_handler
        mmap_bin_files num_dataset_builder_threads num_workers object_storage_cache_path
        per_dataset_sequences_path
        decoder_seq_length encoder_seq_length mask_prob sample_rate short_seq_prob
        fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token
        fim_prefix_token fim_rate fim_split_sample fim_spm_rate fim_suffix_token
        data_sharding
    """,
    REFUSED="""
        create_attention_mask_in_dataloader dataloader_inter_document_masking dataloader_type
        fim_data full_validation hybrid_context_parallel mid_level_dataset_surplus mock_data
        multiple_validation_sets reset_attention_mask sft
    """,
)
"""What becomes of the arguments of Megatron-LM in `feedline.megatron.external_loaders`."""

SAVE_ARGUMENTS = _table(
    NO_EFFECT="cached_metadata cpu_shm_mode separation_hint thread_count",
    FOLLOWED="backend version",
    REFUSED="keep_only_main_replica",
)
"""What becomes of the arguments with which Megatron-LM constructs the strategy of a save."""

_IN_BUILDER = "feedline.megatron.GPTDataset in Megatron's builder"
_MEGATRONS_DATASET = "Megatron's own dataset, without --dataloader-type external"

_REFUSED_IF_SET = {
    "reset_attention_mask": ("batches without attention masks", _IN_BUILDER),
    "dataloader_inter_document_masking": ("batches without cu_seqlens", _IN_BUILDER),
    "full_validation": ("validation that Megatron does not restart", _IN_BUILDER),
    "multiple_validation_sets": ("one validation set", _IN_BUILDER),
    "hybrid_context_parallel": ("samples of one length", _MEGATRONS_DATASET),
    "fim_data": ("documents as they are stored", _MEGATRONS_DATASET),
    "sft": ("documents as they are stored", _MEGATRONS_DATASET),
    "mock_data": ("token files", _MEGATRONS_DATASET),
}


def check_config(config: Any) -> None:
    """Refuses a field of a dataset's config that Feedline does not know and that has been set.

    Args:
        config: A ``GPTDatasetConfig``, or an object of a class that inherits from it.

    Raises:
        ValueError: The value of an unknown field differs from its default.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in CONFIG_FIELDS and not _is_equal(value, _default_of(field)):
            raise ValueError(
                f"cannot read samples with {field.name} of {type(config).__name__} in "
                f"megatron-core {megatron.core.__version__}: expected its default, as Feedline "
                f"does not know it, found {value!r} (hint: {_MEGATRONS_DATASET})"
            )


def check_sequences(config: Any, prefix: str) -> None:
    """Compares the ``sequences_per_dataset`` of a config with the ``.idx`` that Feedline reads.

    Megatron then reads neither the type of tokens nor the counts from the file.

    Raises:
        ValueError: They differ, so that Megatron would read other tokens.
    """
    if not config.sequences_per_dataset:
        return
    path = _feedline.local_path(prefix)
    if path is None:
        raise ValueError(
            f"cannot use --per-dataset-sequences-path with {prefix}: expected a path, found the "
            "URL of a bucket"
        )
    with open(f"{path}.idx", "rb") as file:
        found = _INDEX_HEADER.unpack(file.read(_INDEX_HEADER.size))[2:]
    expected = (config.token_dtype_code, *config.sequences_per_dataset[prefix])
    if found != expected:
        raise ValueError(
            f"cannot read {path}.idx: expected type code, sequences and document boundaries "
            f"{expected} of --per-dataset-sequences-path and the tokenizer, found {found} (hint: "
            "build the file of sequences again, with the vocabulary of the corpus)"
        )


def check_arguments(args: Any, blends: Sequence[Sequence[str] | None]) -> None:
    """Refuses arguments of Megatron-LM with which it would read other batches.

    Args:
        args: The arguments of Megatron-LM.
        blends: The weights and prefixes of each part.

    Raises:
        ValueError: Such an argument, or an unknown one of Megatron's data that has been set.
    """
    kind = getattr(args, "dataloader_type", None)
    if kind not in (None, "external"):
        raise ValueError(
            f"cannot return loaders: expected --dataloader-type external, found {kind}"
        )
    for name, (expected, hint) in _REFUSED_IF_SET.items():
        if getattr(args, name, None):
            raise _refusal(f"--{name.replace('_', '-')}", expected, hint)
    if getattr(args, "create_attention_mask_in_dataloader", False):
        hint = "pass --no-create-attention-mask-in-dataloader"
        raise _refusal("attention masks", "batches without them", hint)
    surplus = getattr(args, "mid_level_dataset_surplus", MID_LEVEL_SURPLUS)
    if surplus != MID_LEVEL_SURPLUS and any(len(paths or ()) > 2 for paths in blends):
        name = f"--mid-level-dataset-surplus {surplus} and a blend"
        raise _refusal(name, f"the default {MID_LEVEL_SURPLUS}", _IN_BUILDER)
    for name, default in unknown_arguments().items():
        value = getattr(args, name, default)
        if not _is_equal(value, default):
            release = megatron.core.__version__
            expected = f"its default in megatron-core {release}, as Feedline does not know it"
            raise _refusal(f"{name}={value!r}", expected, _MEGATRONS_DATASET)


def check_save_arguments(backend: tuple[str, int], arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of the strategy of a save that `feedline.megatron.install` replaces.

    Raises:
        ValueError: Another backend than ``torch_dist`` 1, or an argument that Feedline does not
            know.
    """
    if backend != ("torch_dist", 1):
        raise ValueError(
            f"cannot save a checkpoint: expected the backend torch_dist 1, found {backend}"
        )
    others = [name for name in arguments if SAVE_ARGUMENTS.get(name) != Fate.NO_EFFECT]
    if others:
        raise ValueError(
            f"cannot save a checkpoint: expected arguments that Feedline knows, found {others} "
            f"of megatron-core {megatron.core.__version__}"
        )


def unknown_arguments() -> dict[str, Any]:
    """The arguments of Megatron-LM for data that are not in `ARGUMENTS`, with their defaults; none
    if Megatron-LM has not been imported."""
    add = getattr(sys.modules.get("megatron.training.arguments"), "_add_data_args", None)
    if add is None:
        return {}
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return {
        each.dest: each.default for each in parser._actions if each.dest not in ARGUMENTS
    }


def consumed_samples(args: Any) -> tuple[int, int, int]:
    """The samples after which the loader of each part starts, as Megatron computes them."""
    train = args.consumed_train_samples
    if getattr(args, "phase_transition_iterations", None):
        started = max(i for i in (0, *args.phase_transition_iterations) if i <= args.iteration)
        train = (args.iteration - started) * args.global_batch_size
    valid = 0 if getattr(args, "skip_train", False) else args.consumed_valid_samples
    return train, valid, 0


def micro_batch_sizes(args: Any) -> tuple[int, int, int]:
    """The samples in a batch of each part."""
    evaluation = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    return args.micro_batch_size, evaluation, evaluation


def tokenizer_of_megatron() -> Any:
    """The tokenizer of Megatron-LM, or None if it has built none."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_TOKENIZER", None)


def _refusal(name: str, expected: str, hint: str) -> ValueError:
    return ValueError(
        f"cannot use {name} with --dataloader-type external: expected {expected} (hint: {hint})"
    )


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_equal(value: Any, default: Any) -> bool:
    """Whether a value is the default. Comparing arrays returns no bool, so they are not."""
    return value is default or (type(value) is type(default) and bool(value == default))
