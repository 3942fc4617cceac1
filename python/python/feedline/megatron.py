"""The data of Megatron-core and Megatron-LM, read by feedline.

`GPTDataset` takes the place of Megatron's class of that name in
``BlendedMegatronDatasetBuilder``: the same samples, the same cache files. `external_loaders` gives
the iterators that ``--dataloader-type external`` wants.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.utils import get_blend_from_list

import feedline
from feedline.data import Part
from feedline.torch import Loader, tensors

PARTS: tuple[Part, Part, Part] = ("train", "valid", "test")
NAMES = ("tokens", "labels", "loss_mask", "position_ids")


class GPTDataset(gpt_dataset.GPTDataset):
    """Megatron-core's ``GPTDataset``, which reads through feedline.

    Its name is part of the names of cached sample indexes, so that they are found. Give the
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
        # Without a split all documents belong to this part; Megatron names such indexes otherwise.
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
        if idx is None or self._samples is None:  # None is the padding of a batch
            sample: dict[str, torch.Tensor] = super().__getitem__(idx)
            return sample
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        if self._samples is None:
            return [super(GPTDataset, self).__getitem__(index) for index in indices]
        # Megatron's sampler may go beyond the number of samples, to the end of the last epoch.
        batch = tensors(self._samples._here.read([int(index) for index in indices]))
        return [
            self._sample({name: batch[name][row] for name in NAMES}) for row in range(len(indices))
        ]

    def _sample(self, sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pad = self._pad_token_id
        if pad >= 0:  # an id of the tokenizer's own for padding counts nowhere
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
    ``--no-create-attention-mask-in-dataloader``. They begin at ``args.consumed_train_samples`` and
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
        CorruptError: They are not what their formats say.
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
    """What each part reads, and its split: of one blend, or each a blend of its own."""
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
