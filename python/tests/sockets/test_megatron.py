"""Megatron-core's builder, and the loaders of ``--dataloader-type external``.

The oracle is megatron-core: its own ``GPTDataset`` and ``BlendedDataset``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import inspect
import pickle
import random
import re
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import loader_ranks
import megatron.core
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.rerun_state_machine import RerunDataIterator
from protocols import assert_known
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

import feedline
import feedline.megatron
from feedline import _megatron_options as options

NAMES = ("tokens", "labels", "loss_mask", "position_ids")
SPLIT = "90,5,5"
SIZES = (700, 40, 20)


class Tokenizer:
    """The attributes of GPT-2's vocabulary that datasets of tokens need."""

    vocab_size = 50257
    eod = 50256

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": type(self).__name__, "tokenizer_path": ["gpt2"]}


class PaddingTokenizer(Tokenizer):
    """A tokenizer with a padding id that is in the corpus: GPT-2's letter "e"."""

    pad = 68


class ZeroTokenizer(PaddingTokenizer):
    """Its documents end with the id that a masked padding id gets."""

    eod = 0


FIELDS = {field.name for field in dataclasses.fields(gpt_dataset.GPTDatasetConfig)}


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A process group of one process, which caches of blends need."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def become_rank(rank: int, ranks: int) -> None:
    """Makes this process a data-parallel rank of several, without the others."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=ranks
    )
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def config(cache: Path | None, **changes: Any) -> gpt_dataset.GPTDatasetConfig:
    options = {
        "random_seed": 77,
        "sequence_length": 32,
        "split": SPLIT,
        "path_to_cache": None if cache is None else str(cache),
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        **changes,
    }
    return gpt_dataset.GPTDatasetConfig(**options)


def build(cls: type, settings: gpt_dataset.GPTDatasetConfig, sizes: Any = SIZES) -> Any:
    builder = BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, settings)
    return builder.build()


def assert_equal_samples(ours: Any, theirs: Any, count: int) -> None:
    assert len(ours) == len(theirs)
    for index in range(count):
        our, their = ours[index], theirs[index]
        assert our.keys() == their.keys()
        for name, tensor in their.items():
            if isinstance(tensor, torch.Tensor):
                assert our[name].dtype == tensor.dtype, name
                assert torch.equal(our[name], tensor), (name, index)
            else:
                assert our[name] == tensor, name


def indexes(folder: Path) -> dict[str, bytes]:
    """The files of a cache, without those that Feedline writes for each index that it has read."""
    files = (path for path in sorted(folder.iterdir()) if path.suffix in (".npy", ".txt"))
    return {path.name: path.read_bytes() for path in files}


def rank_batches(dataset: Any, rank: int, ranks: int, micro: int, start: int = 0) -> list[Any]:
    """The index lists of Megatron's sampler: chunks of all ranks, divided among them."""
    chunk = micro * ranks
    firsts = range(start + rank * micro, len(dataset) - chunk + rank * micro + 1, chunk)
    return [list(range(first, first + micro)) for first in firsts]


def digest(batches: Iterable[dict[str, torch.Tensor]], names: Iterable[str] = NAMES) -> str:
    sha = hashlib.sha256()
    for batch in batches:
        for name in names:
            sha.update(batch[name].contiguous().numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"create_attention_mask": True},
        {"eod_mask_loss": True},
        {"reset_position_ids": True},
        {"reset_attention_mask": True, "create_attention_mask": True},
        {
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "eod_mask_loss": True,
            "create_attention_mask": True,
        },
        {"tokenizer": PaddingTokenizer()},
        {"tokenizer": PaddingTokenizer(), "eod_mask_loss": True},
        {"add_extra_token_to_sequence": False},
        {"drop_last_partial_validation_sequence": False},
        {
            "reset_attention_mask": True,
            "create_attention_mask": True,
            "tokenizer": ZeroTokenizer(),
        },
        {"inter_document_masking": True},
        {"inter_document_masking": True, "reset_position_ids": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_the_builder_builds_the_same_samples(
    corpus: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if missing := changes.keys() - FIELDS:
        pytest.skip(f"megatron-core {megatron.core.__version__} has no {missing}")
    settings = config(tmp_path, blend=([corpus], None), **changes)
    theirs = build(gpt_dataset.GPTDataset, settings)
    files = indexes(tmp_path)
    ours = build(feedline.megatron.GPTDataset, settings)
    assert indexes(tmp_path) == files and len(files) == 12
    for our, their, count in zip(ours, theirs, (100, 40, 20), strict=True):
        assert isinstance(our, feedline.megatron.GPTDataset)
        assert our.unique_description_hash == their.unique_description_hash
        assert_equal_samples(our, their, count)
    # None requests the padding of a batch of unequal ranks.
    assert ours[0][None]["loss_mask"].sum() == 0


def test_megatron_finds_indexes_cached_by_feedline(corpus: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    samples = feedline.open(
        corpus,
        sequence_length=32,
        num_samples=700,
        random_seed=77,
        split=SPLIT,
        tokenizer=tokenizer.unique_identifiers,
        path_to_cache=tmp_path,
    )
    files = indexes(tmp_path)
    assert len(files) == 4
    settings = config(tmp_path, blend=([corpus], None), tokenizer=tokenizer)
    theirs = build(gpt_dataset.GPTDataset, settings)[0]
    assert files.items() < indexes(tmp_path).items() and len(indexes(tmp_path)) == 12
    for index in range(0, 700, 50):
        assert torch.equal(torch.from_numpy(samples[index]["tokens"]), theirs[index]["tokens"])


def test_the_cache_beside_the_corpus_is_found(corpora: tuple[str, str]) -> None:
    settings = config(None, blend=([corpora[1]], None))
    theirs = build(gpt_dataset.GPTDataset, settings)[0]
    folder = Path(corpora[1]) / "cache" / "GPTDataset_indices"
    files = indexes(folder)
    ours = build(feedline.megatron.GPTDataset, settings)[0]
    assert indexes(folder) == files
    assert_equal_samples(ours, theirs, 50)


def test_a_blend_of_the_builder(corpora: tuple[str, str], tmp_path: Path) -> None:
    settings = config(tmp_path, blend=(list(corpora), [0.7, 0.3]))
    theirs = build(gpt_dataset.GPTDataset, settings)
    files = indexes(tmp_path)
    ours = build(feedline.megatron.GPTDataset, settings)
    assert indexes(tmp_path) == files
    for our, their, count in zip(ours, theirs, (200, 40, 20), strict=True):
        assert_equal_samples(our, their, count)


def test_a_blend_by_length(corpora: tuple[str, str], tmp_path: Path) -> None:
    settings = config(tmp_path, blend=(list(corpora), None))
    theirs = build(gpt_dataset.GPTDataset, settings)
    ours = build(feedline.megatron.GPTDataset, settings)
    assert_equal_samples(ours[0], theirs[0], 200)


def test_a_corpus_for_each_part(corpora: tuple[str, str], tmp_path: Path) -> None:
    parts = [([corpora[0]], None), ([corpora[1]], None), None]
    settings = config(tmp_path, split=None, blend_per_split=parts)
    theirs = build(gpt_dataset.GPTDataset, settings)
    ours = build(feedline.megatron.GPTDataset, settings)
    assert ours[2] is theirs[2] is None
    for our, their in zip(ours[:2], theirs[:2], strict=True):
        assert_equal_samples(our, their, 40)


@dataclasses.dataclass
class LaterConfig(gpt_dataset.GPTDatasetConfig):
    """The config of a release that has one more field."""

    later: int = 0


def test_a_field_of_a_later_release_is_refused(corpus: str, tmp_path: Path) -> None:
    settings = vars(config(tmp_path, blend=([corpus], None)))
    init = {field.name for field in dataclasses.fields(LaterConfig) if field.init}
    settings = {name: value for name, value in settings.items() if name in init}
    assert build(feedline.megatron.GPTDataset, LaterConfig(**settings))[0] is not None
    release = f"later of LaterConfig in megatron-core {megatron.core.__version__}.*found 1"
    with pytest.raises(ValueError, match=release):
        build(feedline.megatron.GPTDataset, LaterConfig(**settings, later=1))


def test_sequences_of_another_corpus_are_refused(corpus: str, tmp_path: Path) -> None:
    # Megatron takes the counts from the config, and the type of tokens from the vocabulary.
    def settings(sequences: tuple[int, int], vocab_size: int = 50257) -> Any:
        tokenizer = Tokenizer()
        tokenizer.vocab_size = vocab_size
        counts = {corpus: sequences}
        blend = ([corpus], None)
        return config(tmp_path, blend=blend, tokenizer=tokenizer, sequences_per_dataset=counts)

    theirs, ours = (
        build(cls, settings((200, 201)))[0]
        for cls in (gpt_dataset.GPTDataset, feedline.megatron.GPTDataset)
    )
    assert_equal_samples(ours, theirs, 50)
    with pytest.raises(ValueError, match=r"\(4, 200, 201\).*found \(8, 200, 201\)"):
        build(feedline.megatron.GPTDataset, settings((200, 201), vocab_size=100_000))
    with pytest.raises(ValueError, match=r"expected type code.*\(8, 199, 200\)"):
        options.check_sequences(settings((199, 200)), corpus)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_data_loader_of_each_rank(corpus: str, tmp_path: Path, ranks: int) -> None:
    settings = config(tmp_path, blend=([corpus], None))
    ours, theirs = (
        build(cls, settings)[0] for cls in (feedline.megatron.GPTDataset, gpt_dataset.GPTDataset)
    )
    for rank in range(ranks):
        batches = rank_batches(theirs, rank, ranks, 4)
        found = digest(DataLoader(ours, batch_sampler=batches))
        assert found == digest(DataLoader(theirs, batch_sampler=batches))
    # Two calls of each rank reveal its stride, and the last may end beyond the order.
    assert ours._samples._core.hits >= ranks * (len(batches) - 3)


def arguments(data_path: list[str] | None, **changes: Any) -> Namespace:
    """The arguments of Megatron-LM for data."""
    values = {
        "data_path": data_path,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
        "split": SPLIT,
        "seq_length": 32,
        "seed": 77,
        "data_cache_path": None,
        "micro_batch_size": 4,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        **changes,
    }
    return Namespace(**values)


def external(
    data_path: Any, tmp_path: Path, sizes: Any = SIZES, tokenizer: Any = None, **changes: Any
) -> Any:
    values = arguments(data_path, data_cache_path=str(tmp_path), **changes)
    tokenizer = Tokenizer().unique_identifiers if tokenizer is None else tokenizer
    return feedline.megatron.external_loaders(values, sizes, tokenizer=tokenizer)


def of_megatron(dataset: Any, start: int, end: int, micro: int = 4) -> str:
    """The hash of batches of a dataset of Megatron."""
    rows = [list(range(first, first + micro)) for first in range(start, end - micro + 1, micro)]
    return digest(DataLoader(dataset, batch_sampler=rows))


def oracle(cache: Path, blend: Any, ranks: list[tuple[int, int]], start: int = 0) -> list[str]:
    """The hashes of Megatron's batches of the training part, of each ``(rank, ranks)``."""
    dataset = build(gpt_dataset.GPTDataset, config(cache, blend=blend))[0]
    hashes = []
    for rank, count in ranks:
        batches = [b for b in rank_batches(dataset, rank, count, 4, start) if max(b) < 700]
        batches = batches[: (700 - start) // (4 * count)]
        hashes.append(digest(DataLoader(dataset, batch_sampler=batches)))
    return hashes


@pytest.mark.parametrize("blended", [False, True], ids=["one", "blend"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_external_loaders_give_megatrons_batches(
    corpora: tuple[str, str], tmp_path: Path, ranks: int, blended: bool
) -> None:
    blend = (list(corpora), [0.7, 0.3]) if blended else ([corpora[0]], None)
    data_path = ["0.7", corpora[0], "0.3", corpora[1]] if blended else [corpora[0]]
    expected = oracle(tmp_path, blend, [(rank, ranks) for rank in range(ranks)])
    files = indexes(tmp_path)
    for rank in range(ranks):
        become_rank(rank, ranks)
        train, _, _ = external(data_path, tmp_path)
        wrapped = RerunDataIterator(train)
        found = digest(next(wrapped) for _ in range(len(train)))
        assert found == expected[rank]
        with pytest.raises(StopIteration):
            next(wrapped)
    assert indexes(tmp_path) == files


def test_external_batches_have_megatrons_types(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 2)
    train, valid, test = external([corpus], tmp_path)
    for loader in (train, valid, test):
        batch = next(RerunDataIterator(loader))
        assert tuple(batch) == NAMES
        assert {name: tensor.dtype for name, tensor in batch.items()} == {
            "tokens": torch.int64,
            "labels": torch.int64,
            "loss_mask": torch.float32,
            "position_ids": torch.int64,
        }
        assert all(tensor.shape == (4, 32) for tensor in batch.values())
        # With --full-validation Megatron takes objects with these attributes for datasets.
        assert not hasattr(loader, "split") and not hasattr(loader, "index_split")
    assert pickle.loads(pickle.dumps(train.save_state()))["samples_consumed"] == 8


def test_twenty_restarts_read_one_stream(corpus: str, tmp_path: Path) -> None:
    expected = oracle(tmp_path, ([corpus], None), [(0, 1)])[0]
    become_rank(0, 1)
    stops = sorted(random.Random(5).sample(range(1, 175), 20)) + [175]
    batches: list[Any] = []
    for stop in stops:
        consumed = len(batches) * 4
        train = external([corpus], tmp_path, consumed_train_samples=consumed)[0]
        batches += [next(train) for _ in range(stop - len(batches))]
        assert train.samples_consumed == stop * 4
    assert digest(batches) == expected


def test_two_ranks_resume_as_three(corpora: tuple[str, str], tmp_path: Path) -> None:
    blend = (list(corpora), [0.7, 0.3])
    data_path = ["0.7", corpora[0], "0.3", corpora[1]]
    expected = oracle(tmp_path, blend, [(rank, 3) for rank in range(3)], start=15 * 8)
    for rank in range(2):
        become_rank(rank, 2)
        train = external(data_path, tmp_path)[0]
        for _ in range(15):
            next(train)
        state = train.save_state()
    for rank in range(3):
        become_rank(rank, 3)
        consumed = state["samples_consumed"]
        train = external(data_path, tmp_path, consumed_train_samples=consumed)[0]
        assert digest(train) == expected[rank]


def test_ranks_of_a_tensor_parallel_group_are_not_guessed(
    corpus: str, tmp_path: Path, start: Callable[..., Any]
) -> None:
    loader_ranks.check(start, corpus, tmp_path, "megatron")


def test_loaders_end_and_then_start_again(corpus: str, tmp_path: Path) -> None:
    """Megatron calls ``next`` alone, so that its runs end."""
    become_rank(0, 1)
    train = external([corpus], tmp_path)[0]
    whole = digest(train)
    assert next(train, None) is None and next(train, None) is None
    assert digest(train) == whole


def test_validation_resumes_at_consumed_samples(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 1)
    valid = external([corpus], tmp_path)[1]
    batches = [next(valid) for _ in range(5)]
    resumed = external([corpus], tmp_path, consumed_valid_samples=12)[1]
    assert torch.equal(next(resumed)["tokens"], batches[3]["tokens"])


def test_arguments_reach_the_samples(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 1)
    settings = config(
        tmp_path, blend=([corpus], None), reset_position_ids=True, eod_mask_loss=True
    )
    theirs = build(gpt_dataset.GPTDataset, settings)[0]
    values = arguments(
        [corpus], data_cache_path=str(tmp_path), reset_position_ids=True, eod_mask_loss=True
    )
    train = feedline.megatron.external_loaders(
        values, (700, 0, 0), tokenizer=Tokenizer().unique_identifiers, special={"eod": 50256}
    )[0]
    assert train is not None
    batches = [list(range(first, first + 4)) for first in range(0, 700, 4)]
    assert digest(train) == digest(DataLoader(theirs, batch_sampler=batches))


@pytest.mark.parametrize("tokenizer", [PaddingTokenizer(), ZeroTokenizer()])
@pytest.mark.parametrize("is_global", [False, True])
def test_a_padding_id_in_the_corpus_is_masked(
    corpus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
    is_global: bool,
) -> None:
    become_rank(0, 1)
    options = {"reset_position_ids": True, "eod_mask_loss": True}
    settings = config(tmp_path, blend=([corpus], None), tokenizer=tokenizer, **options)
    theirs = build(gpt_dataset.GPTDataset, settings)[0]
    files = indexes(tmp_path)
    values = arguments([corpus], data_cache_path=str(tmp_path), **options)
    if is_global:
        module: Any = types.ModuleType("megatron.training.global_vars")
        module._GLOBAL_TOKENIZER = tokenizer
        monkeypatch.setitem(sys.modules, module.__name__, module)
        train = feedline.megatron.external_loaders(values, (700, 0, 0))[0]
    else:
        train = feedline.megatron.external_loaders(values, (700, 0, 0), tokenizer=tokenizer)[0]
    assert train is not None and digest(train) == of_megatron(theirs, 0, 700)
    assert indexes(tmp_path) == files


@pytest.mark.parametrize("allows", [False, True])
def test_a_padding_id_of_another_token_is_masked_on_request(
    corpus: str, tmp_path: Path, allows: bool
) -> None:
    become_rank(0, 1)
    tokenizer = PaddingTokenizer()
    tokenizer.pad = tokenizer.eod
    option = {"allow_ambiguous_pad_tokens": allows}
    settings = config(tmp_path, blend=([corpus], None), tokenizer=tokenizer, **option)
    theirs = build(gpt_dataset.GPTDataset, settings)[0]
    train = external([corpus], tmp_path, tokenizer=tokenizer, **option)[0]
    assert digest(train) == of_megatron(theirs, 0, 700)


def test_evaluation_has_its_own_batch_size(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 1)
    theirs = build(gpt_dataset.GPTDataset, config(tmp_path, blend=([corpus], None)))
    loaders = external([corpus], tmp_path, eval_micro_batch_size=2, consumed_valid_samples=6)
    assert next(loaders[0])["tokens"].shape == (4, 32)
    assert digest(loaders[1]) == of_megatron(theirs[1], 6, 40, micro=2)
    assert digest(loaders[2]) == of_megatron(theirs[2], 0, 20, micro=2)


def test_a_phase_starts_at_its_first_sample(corpus: str, tmp_path: Path) -> None:
    # Megatron passes the samples of the phase, and counts the iterations of the run.
    become_rank(0, 1)
    theirs = build(gpt_dataset.GPTDataset, config(tmp_path, blend=([corpus], None)))[0]
    phases = {"phase_transition_iterations": [10, 50], "global_batch_size": 8}
    for iteration, start in ((0, 0), (9, 72), (10, 0), (12, 16), (50, 0)):
        consumed = {"iteration": iteration, "consumed_train_samples": iteration * 8}
        train = external([corpus], tmp_path, **phases, **consumed)[0]
        assert digest(train) == of_megatron(theirs, start, 700)


def test_validation_alone_starts_at_its_first_sample(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 1)
    theirs = build(gpt_dataset.GPTDataset, config(tmp_path, blend=([corpus], None)))[1]
    valid = external([corpus], tmp_path, consumed_valid_samples=12, skip_train=True)[1]
    assert digest(valid) == of_megatron(theirs, 0, 40)


def test_paths_of_each_part(corpora: tuple[str, str], tmp_path: Path) -> None:
    become_rank(0, 1)
    parts = [([corpora[0]], None), ([corpora[1]], None), None]
    theirs = build(gpt_dataset.GPTDataset, config(tmp_path, split=None, blend_per_split=parts))
    loaders = external(
        None,
        tmp_path,
        split=None,
        train_data_path=[corpora[0]],
        valid_data_path=[corpora[1]],
    )
    assert loaders[2] is None
    for loader, dataset, count in zip(loaders[:2], theirs[:2], (700, 40), strict=True):
        batches = [list(range(first, first + 4)) for first in range(0, count, 4)]
        assert digest(loader) == digest(DataLoader(dataset, batch_sampler=batches))


def test_paths_in_files(corpora: tuple[str, str], tmp_path: Path) -> None:
    become_rank(0, 1)
    expected = digest(external(["0.7", corpora[0], "0.3", corpora[1]], tmp_path)[0])
    blend = tmp_path / "blend.txt"
    blend.write_text(f"0.7 {corpora[0]}\n0.3 {corpora[1]}\n")
    assert digest(external(None, tmp_path, data_args_path=str(blend))[0]) == expected


def test_parts_without_a_share_have_no_loader(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 1)
    train, valid, test = external([corpus], tmp_path, split="9,1,0")
    assert train is not None and valid is not None and test is None
    assert external([corpus], tmp_path, sizes=(700, 0, 0))[1:] == (None, None)


@pytest.mark.parametrize(
    ("data_path", "changes", "text"),
    [
        (["FIRST", "SECOND"], {}, "a weight before each prefix"),
        (["1.0", "FIRST"], {}, "a weight before each prefix"),
        (None, {}, "cannot read --data-path"),
        (["FIRST"], {"reset_attention_mask": True}, "cannot use --reset-attention-mask"),
        (["FIRST"], {"dataloader_type": "cyclic"}, "external, found cyclic"),
        (["FIRST"], {"create_attention_mask_in_dataloader": True}, "pass --no-create-att"),
        *(
            (["FIRST"], {name: True}, f"cannot use --{name.replace('_', '-')} with")
            for name in (
                "dataloader_inter_document_masking",
                "fim_data",
                "full_validation",
                "hybrid_context_parallel",
                "mock_data",
                "multiple_validation_sets",
                "sft",
            )
        ),
        (
            ["0.7", "FIRST", "0.3", "SECOND"],
            {"mid_level_dataset_surplus": 0.2},
            "cannot use --mid-level-dataset-surplus 0.2 and a blend",
        ),
    ],
)
def test_arguments_that_megatron_reads_differently_are_refused(
    corpora: tuple[str, str], tmp_path: Path, data_path: Any, changes: Any, text: str
) -> None:
    become_rank(0, 1)
    names = {"FIRST": corpora[0], "SECOND": corpora[1]}
    with pytest.raises(ValueError, match=text):
        external(data_path and [names.get(x, x) for x in data_path], tmp_path, **changes)


def test_the_surplus_of_one_corpus_changes_nothing(corpus: str, tmp_path: Path) -> None:
    become_rank(0, 1)
    settings = config(tmp_path, blend=([corpus], None), mid_level_dataset_surplus=0.2)
    theirs = build(gpt_dataset.GPTDataset, settings)[0]
    train = external([corpus], tmp_path, mid_level_dataset_surplus=0.2)[0]
    assert digest(train) == of_megatron(theirs, 0, 700)


def test_an_argument_of_a_later_release_is_refused(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(parser: Any) -> Any:
        parser.add_argument("--split", default=None)
        parser.add_argument("--later", default="no")
        return parser

    become_rank(0, 1)
    module: Any = types.ModuleType("megatron.training.arguments")
    module._add_data_args = add
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert external([corpus], tmp_path, later="no")[0] is not None
    with pytest.raises(ValueError, match=r"cannot use later='yes'.*its default in megatron-core"):
        external([corpus], tmp_path, later="yes")


def test_the_options_of_this_release_are_known() -> None:
    # Those of later releases than the oldest one.
    added = {"inter_document_masking"}
    assert_known(FIELDS | added, options.CONFIG_FIELDS, "GPTDatasetConfig")
    assert_known(gpt_dataset.Split.__members__, ["train", "valid", "test"], "Split")
    assert_known(
        gpt_dataset.GPTDataset._key_config_attributes(),
        ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"],
        "names of cached indexes",
    )
    for function, names in (
        (
            gpt_dataset.GPTDataset.__init__,
            "self indexed_dataset dataset_path indexed_indices num_samples index_split config",
        ),
        (gpt_dataset.GPTDataset.__getitem__, "self idx"),
        (
            gpt_dataset._get_ltor_masks_and_position_ids,
            "data eod_token reset_position_ids reset_attention_mask eod_mask_loss "
            "create_attention_mask",
        ),
        (
            BlendedMegatronDatasetBuilder.__init__,
            "self cls sizes is_built_on_rank config",
        ),
    ):
        found = inspect.signature(function).parameters
        assert_known(found, names.split(), function.__qualname__)


def test_the_data_arguments_of_this_release_are_known() -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron-core 0.16 has no megatron.training")
    from megatron.training import arguments as parsers
    from megatron.training import global_vars, training
    from megatron.training.datasets import data_samplers

    parser = ArgumentParser(add_help=False)
    parsers._add_data_args(parser)
    found = {action.dest for action in parser._actions}
    for function in (
        training.get_train_valid_test_num_samples,
        training.build_train_valid_test_data_loaders,
        data_samplers.build_pretraining_data_loader,
    ):
        source = inspect.getsource(function)
        found |= set(re.findall(r"\bargs\.(\w+)", source))
        found |= set(re.findall(r"getattr\(args, [\"'](\w+)", source))
    # Read by the provider of datasets, in Megatron-LM's script.
    found |= {"seed", "sft"}
    assert_known(found, options.ARGUMENTS, "arguments of megatron.training for data")
    assert hasattr(global_vars, "_GLOBAL_TOKENIZER")
