"""torchtitan's data loader, and its validator and trainer, which need more than PyTorch 2.11."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from protocols import assert_known, fields_of, parameters_of
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools import utils

import feedline
import feedline.torchtitan

EOD = 50256


def newer(module: str) -> Any:
    """A module of torchtitan that cannot be imported with torch 2.11."""
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        pytest.skip(f"{module} of torchtitan 0.3.0 needs a newer torch than 2.11")
    return importlib.import_module(module)


class Tokenizer(BaseTokenizer):
    """GPT-2's tokenizer, of which the loader only needs the EOD id."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = EOD

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 50257


def build(
    corpus: str, rank: int, ranks: int, *, tokenizer: Any = None, micro: int = 4, **config: Any
) -> BaseDataLoader:
    """Builds the loader as torchtitan's trainer does."""
    settings = feedline.torchtitan.DataLoader.Config(
        dataset_path=corpus, **{"num_samples": 240, **config}
    )
    loader: BaseDataLoader = settings.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=tokenizer or Tokenizer(),
        seq_len=32,
        local_batch_size=micro,
        snapshot_every_n_steps=10,
    )
    return loader


@pytest.fixture(scope="module")
def tokens(corpus: str) -> torch.Tensor:
    dataset = feedline.open(corpus, sequence_length=32, num_samples=240)
    return torch.from_numpy(dataset.read(range(240))["tokens"])


def test_items_are_inputs_and_labels(corpus: str, tokens: torch.Tensor) -> None:
    loader = build(corpus, 1, 2, reset_at_document=False, mask_eod_loss=False)
    assert isinstance(loader, BaseDataLoader)
    items = list(loader)
    assert len(items) == 30
    for step, (inputs, labels) in enumerate(items):
        expected = tokens[step * 8 + 4 : step * 8 + 8]
        assert set(inputs) == {"input", "positions"}
        assert torch.equal(inputs["input"], expected)
        assert torch.equal(labels[:, :-1], expected[:, 1:])
        assert torch.equal(inputs["positions"], torch.arange(32).expand(4, -1))
        assert all(each.dtype == torch.int64 for each in (*inputs.values(), labels))


def test_two_ranks_resume_as_one(corpus: str, tokens: torch.Tensor, tmp_path: Path) -> None:
    loaders = [build(corpus, rank, 2) for rank in range(2)]
    for loader in loaders:
        items = iter(loader)
        for _ in range(5):
            next(items)
    assert loaders[0].state_dict() == loaders[1].state_dict()
    dcp.save({"dataloader": loaders[0]}, checkpoint_id=tmp_path, no_dist=True)
    one = build(corpus, 0, 1)
    dcp.load({"dataloader": one}, checkpoint_id=tmp_path, no_dist=True)
    rest = torch.cat([inputs["input"] for inputs, _ in one])
    assert torch.equal(rest, tokens[40:])


def test_an_empty_state_starts_at_the_first_sample(corpus: str, tokens: torch.Tensor) -> None:
    loader = build(corpus, 0, 1)
    loader.load_state_dict({})
    assert torch.equal(next(iter(loader))[0]["input"], tokens[:4])


def test_a_checkpoint_of_other_data_is_refused(corpora: tuple[str, str], tmp_path: Path) -> None:
    dcp.save({"dataloader": build(corpora[0], 0, 1)}, checkpoint_id=tmp_path, no_dist=True)
    other = build(corpora[1], 0, 1)
    with pytest.raises(feedline.OtherDataError, match="expected corpora"):
        dcp.load({"dataloader": other}, checkpoint_id=tmp_path, no_dist=True)


@pytest.fixture(scope="module")
def rows(corpus: str) -> list[list[int]]:
    """The samples of the loader with the token after each: 33 ids."""
    read = feedline.open(corpus, sequence_length=32, num_samples=240).read(range(240))
    found: list[list[int]] = np.hstack([read["tokens"], read["labels"][:, -1:]]).tolist()
    return found


def items_of(loader: BaseDataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Samples of a loader as input, positions and labels of the shape [32]."""
    for inputs, labels in loader:
        yield from zip(inputs["input"], inputs["positions"], labels, strict=True)


def documents_of(row: list[int]) -> list[list[int]]:
    """A row divided after each token that ends a document."""
    ends = [index + 1 for index, token in enumerate(row) if token == EOD]
    parts = [row[first:end] for first, end in itertools.pairwise([0, *ends, len(row)])]
    return [part for part in parts if part]


def test_documents_are_those_of_torchtitans_own_loader(
    corpus: str, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text_datasets = newer("torchtitan.hf_datasets.text_datasets")
    restarts = 0
    for row, (inputs, positions, labels) in zip(
        rows, items_of(build(corpus, 0, 1)), strict=True
    ):
        is_input = inputs != EOD
        count = int(is_input.sum())
        documents = documents_of(row)
        # The first sample ends within a document, so that the second continues it.
        documents[0] = [1] * count + documents[0]
        stored = text_datasets.Dataset.from_list([{"ids": ids} for ids in documents])
        config = text_datasets.DatasetConfig(
            path="rows", loader=lambda _, stored=stored: stored, sample_processor=dict.popitem
        )
        monkeypatch.setitem(text_datasets.DATASETS, "rows", config)
        own = text_datasets.HuggingFaceTextDataset(
            "rows",
            None,
            SimpleNamespace(encode=lambda item, **_: item[1]),
            seq_len=count,
        )
        _, (expected, expected_labels) = own
        assert torch.equal(inputs[is_input], expected["input"])
        assert torch.equal(positions[is_input], expected["positions"])
        assert torch.equal(labels[is_input], expected_labels)
        assert (labels[~is_input] == -100).all()
        restarts += int((positions == 0).sum()) - 1
    assert restarts > 20


def test_attention_masks_end_at_documents(corpus: str) -> None:
    attention = newer("torchtitan.models.common.attention")
    for inputs, positions, _ in itertools.islice(items_of(build(corpus, 0, 1)), 40):
        ids = (inputs == EOD).cumsum(0)
        document = ids - (inputs == EOD).int()  # the end of a document belongs to it
        mask = attention.get_document_mask_mod(positions[None])
        query, key = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        assert torch.equal(mask(0, 0, query, key), document[query] == document[key])


def test_documents_may_be_ignored(corpus: str) -> None:
    loader = build(corpus, 0, 1, reset_at_document=False, mask_eod_loss=False)
    for _, positions, labels in items_of(loader):
        assert torch.equal(positions, torch.arange(32))
        assert (labels != -100).all()


def test_the_settings_of_a_run_apply(corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    with feedline.open(corpus, sequence_length=32, num_samples=240) as samples:
        run.write_text(samples.config)
    for flag, restarts in ((None, False), (False, False), (True, True)):
        loader = build(str(run), 0, 1, reset_at_document=flag)
        assert restarts == any((p[1:] == 0).any() for _, p, _ in items_of(loader))


def test_a_run_of_another_objective_is_refused(tmp_path: Path) -> None:
    text = " ".join(f"Here is sentence {number} of a text." for number in range(20))
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "{text}"}}\n' * 20)
    texts, out = tmp_path / "texts.jsonl", tmp_path / "texts"
    feedline.preprocess(texts, out, tokenizer="gpt2", objective="sentences", progress=False)
    with feedline.open(
        f"{tmp_path}/texts_text_sentence",
        sequence_length=32,
        num_samples=40,
        objective="span-corruption",
        decoder_sequence_length=16,
        tokenizer="gpt2",
        special={"bos": 1, "eos": 2, "pad": 3, "sentinels": [20, 30]},
    ) as samples:
        (tmp_path / "run.toml").write_text(samples.config)
    with pytest.raises(ValueError, match="expected objective 'lm', found 'span-corruption'"):
        build(f"{tmp_path}/run.toml", 0, 1)


def test_a_tokenizer_of_another_corpus_is_refused(corpus: str) -> None:
    other = SimpleNamespace(eos_id=2)
    with pytest.raises(ValueError, match="expected the tokenizer's eos_id 2, found 50256"):
        build(corpus, 0, 1, tokenizer=other)
    with pytest.raises(ValueError, match="expected a tokenizer with an eos_id, found none"):
        build(corpus, 0, 1, tokenizer=SimpleNamespace(eos_id=None))
    ignored = {"reset_at_document": False, "mask_eod_loss": False}
    assert next(iter(build(corpus, 0, 1, tokenizer=other, **ignored)))
    with pytest.raises(ValueError, match="found 50256"):
        build(corpus, 0, 1, tokenizer=other, reset_at_document=False)


def test_a_missing_dataset_path_is_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match="expected dataset_path"):
        build("", 0, 1)


def stream(loader: BaseDataLoader, batches: int) -> torch.Tensor:
    """The inputs of the next batches, of the shape [batches, micro, 32]."""
    found = [inputs["input"] for inputs, _ in itertools.islice(loader, batches)]
    assert len(found) == batches
    return torch.stack(found)


@pytest.fixture(scope="module")
def ten(corpus: str) -> torch.Tensor:
    """The ten samples of a small order, 20 times."""
    read = feedline.open(corpus, sequence_length=32, num_samples=10).read(range(10))
    return torch.from_numpy(read["tokens"]).repeat(20, 1)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 5), (1, 4), (2, 3), (3, 1), (3, 4)])
def test_an_infinite_loader_starts_again(
    corpus: str, ten: torch.Tensor, ranks: int, micro: int
) -> None:
    """Batches that end with the samples, that contain their end, and that are larger."""
    chunks = ten[: 12 * ranks * micro].view(12, ranks, micro, 32)
    for rank in range(ranks):
        loader = build(corpus, rank, ranks, micro=micro, num_samples=10, infinite=True)
        assert torch.equal(stream(loader, 12), chunks[:, rank])
        assert loader.state_dict()["samples_consumed"] == 12 * ranks * micro


def test_labels_and_positions_are_those_of_the_first_pass(corpus: str) -> None:
    loader = build(corpus, 0, 1, micro=4, num_samples=50, infinite=True)
    items = list(itertools.islice(items_of(loader), 160))
    for index, item in enumerate(items):
        for found, first in zip(item, items[index % 50], strict=True):
            assert torch.equal(found, first)
    # The batch that has the end and the start has documents, too.
    assert any((labels == -100).any() for _, _, labels in items[48:52])


def test_a_state_of_a_later_pass_continues_in_any_number_of_ranks(
    corpus: str, ten: torch.Tensor, tmp_path: Path
) -> None:
    options = {"num_samples": 10, "infinite": True}
    consumed = 0
    loader = build(corpus, 0, 1, micro=4, **options)
    for step, (ranks, micro) in enumerate([(1, 4), (2, 3), (3, 4), (1, 1), (2, 5), (1, 3)]):
        saved = tmp_path / f"{step}"
        dcp.save({"dataloader": loader}, checkpoint_id=saved, no_dist=True)
        for rank in reversed(range(ranks)):
            loader = build(corpus, rank, ranks, micro=micro, **options)
            dcp.load({"dataloader": loader}, checkpoint_id=saved, no_dist=True)
            assert loader.state_dict()["samples_consumed"] == consumed
            chunks = ten[consumed : consumed + 3 * ranks * micro].view(3, ranks, micro, 32)
            assert torch.equal(stream(loader, 3), chunks[:, rank])
        consumed += 3 * ranks * micro
    assert consumed > 40
    with pytest.raises(ValueError, match="expected at most 10 samples, found 108 .*infinite"):
        build(corpus, 0, 1, num_samples=10).load_state_dict(loader.state_dict())
    for infinite in (False, True):
        other = build(corpus, 0, 1, num_samples=12, infinite=infinite)
        with pytest.raises(feedline.OtherDataError, match="num_samples = 10"):
            other.load_state_dict(loader.state_dict())


def test_a_state_of_the_end_starts_the_next_pass(corpus: str, ten: torch.Tensor) -> None:
    ended = build(corpus, 0, 1, micro=5, num_samples=10)
    assert len(list(ended)) == 2
    state = ended.state_dict()
    assert list(ended) == [] and state["samples_consumed"] == 10  # as torchtitan's own loaders
    again = build(corpus, 0, 1, micro=5, num_samples=10, infinite=True)
    again.load_state_dict(state)
    assert torch.equal(stream(again, 3).view(15, 32), ten[:15])
    # A state of the first pass, loaded after others, counts from the start.
    again.load_state_dict({**state, "samples_consumed": 5})
    assert torch.equal(stream(again, 1)[0], ten[5:10])
    assert again.state_dict()["samples_consumed"] == 10


def test_a_second_loop_is_empty_with_a_warning(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of torchtitan's own loaders, whose trainer then ends the run."""
    lines: list[str] = []
    monkeypatch.setattr(feedline.torchtitan.logger, "warning", lines.append)
    loader = build(corpus, 0, 1, micro=5, num_samples=10)
    assert [len(list(loader)) for _ in range(2)] == [2, 0]
    assert len(lines) == 2 and all("the samples have ended, after 10 of 10" in n for n in lines)


def test_all_ranks_have_the_same_number_of_batches(corpus: str) -> None:
    for ranks, micro in ((3, 1), (2, 2), (1, 10)):
        loaders = [build(corpus, rank, ranks, micro=micro, num_samples=10) for rank in range(ranks)]
        assert {len(list(loader)) for loader in loaders} == {10 // (ranks * micro)}
    with pytest.raises(ValueError, match="expected at least 12 samples.*found 10 .*infinite"):
        build(corpus, 0, 3, num_samples=10)


class Constant(torch.nn.Module):
    """Logits that do not depend on the input, which it records."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens)
        return torch.zeros(*tokens.shape, 2)


@pytest.mark.parametrize(("steps", "batches"), [(-1, 2), (2, 2), (7, 7)])
def test_torchtitans_validator_sees_the_same_data_each_time(
    corpus: str, ten: torch.Tensor, monkeypatch: pytest.MonkeyPatch, steps: int, batches: int
) -> None:
    """Also with more steps than there are samples."""
    validate = newer("torchtitan.components.validate")
    monkeypatch.setattr(utils, "device_type", "cpu")
    names = ("pp_enabled", "dp_enabled", "cp_enabled", "dp_cp_enabled")
    losses: list[float] = []
    config = feedline.torchtitan.DataLoader.Config(dataset_path=corpus, num_samples=10)
    validator = validate.Validator.Config(enable=True, steps=steps, dataloader=config).build(
        parallelism=SimpleNamespace(spmd_backend="default"),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=Tokenizer(),
        parallel_dims=SimpleNamespace(**dict.fromkeys(names, False)),
        loss_fn=lambda predictions, labels: (torch.tensor(float((labels != -100).sum())), None),
        validation_context=torch.no_grad,
        metrics_processor=SimpleNamespace(
            ntokens_since_last_log=0, log_validation=lambda loss, step: losses.append(loss)
        ),
        seq_len=32,
        local_batch_size=4,
    )
    for step in (1, 2, 3):
        model = Constant()
        validator.validate([model], step)
        assert torch.equal(torch.cat(model.seen), ten[: batches * 4])
    assert losses == [1.0, 1.0, 1.0]


def test_torchtitans_trainer_resumes_bit_for_bit(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    newer("torchtitan.trainer")
    program = Path(__file__).with_name("torchtitan_trainer.py")
    whole = start(program, tmp_path / "whole").output().splitlines()
    validations = [line.split(":")[0] for line in whole if line.startswith("validation")]
    assert validations == ["validation 1", "validation 3", "validation 6"]
    killed = start(program, tmp_path / "run", 5)
    step = next(index for index, line in enumerate(whole) if line.startswith("step 5:"))
    killed.wait_for(whole[step])
    killed.kill()
    # The newest checkpoint is that of step 4.
    assert start(program, tmp_path / "run").output().splitlines() == whole[step:]


def test_what_is_not_known_is_refused(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = feedline.torchtitan.DataLoader.Config(dataset_path=corpus, num_samples=240)
    parts = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 32, "local_batch_size": 4}
    with pytest.raises(ValueError, match="found 'shuffle'"):
        config.build(tokenizer=Tokenizer(), shuffle=True, **parts)
    with pytest.raises(ValueError, match="expected no dataset, found 'c4'"):
        build(corpus, 0, 1, dataset="c4")
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        with pytest.raises(TypeError, match=name):
            build(corpus, 0, 1, **{name: 1})
    # As if it were a field of a newer torchtitan: only its default is accepted.
    monkeypatch.setattr(feedline.torchtitan, "DATA_FIELDS", ("dataset_path",))
    assert build(corpus, 0, 1)
    with pytest.raises(ValueError, match="cannot use dataset of BaseDataLoader.Config"):
        build(corpus, 0, 1, dataset="c4")


def test_the_validator_may_set_infinite(corpus: str) -> None:
    config = feedline.torchtitan.DataLoader.Config(dataset_path=corpus)
    assert not config.infinite and dataclasses.replace(config, infinite=True).infinite


def test_torchtitan_has_the_names_that_are_implemented() -> None:
    assert_known(BaseDataLoader.__abstractmethods__, ["__iter__"], "BaseDataLoader")
    assert_known(
        fields_of(BaseDataLoader.Config), feedline.torchtitan.DATA_FIELDS, "BaseDataLoader.Config"
    )


def test_torchtitans_validator_has_the_names_that_are_known() -> None:
    validate = newer("torchtitan.components.validate")
    known = ["dataloader", "enable", "freq", "steps"]
    assert_known(fields_of(validate.Validator.Config), known, "Validator.Config")
    text_datasets = newer("torchtitan.hf_datasets.text_datasets")
    loader = text_datasets.HuggingFaceTextDataLoader
    own = ["infinite", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor"]
    known = [*feedline.torchtitan.DATA_FIELDS, *own]
    assert_known(fields_of(loader.Config), known, "HuggingFaceTextDataLoader.Config")
    ours = parameters_of(feedline.torchtitan.DataLoader.__init__)
    theirs = parameters_of(loader.__init__)
    assert_known(theirs, [*ours[:-1], "kwargs"], "HuggingFaceTextDataLoader")
