"""Samples of T5 and BERT match megatron-core's datasets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.utils import Split

import feedline

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
SENTINELS = [f"<extra_id_{number}>" for number in range(30)]
WORDS = [f"##p{number}" if number % 3 == 0 else f"w{number}" for number in range(300)]
VOCAB = SPECIAL + SENTINELS + WORDS
SAMPLES = 400


class Tokenizer:
    """The vocabulary, with the interface that Megatron's datasets need."""

    vocab_size = len(VOCAB)
    inv_vocab = dict(enumerate(VOCAB))
    pad, cls, sep, mask, bos, eos = 0, 2, 3, 4, 5, 6
    additional_special_tokens_ids = list(range(len(SPECIAL), len(SPECIAL) + len(SENTINELS)))
    unique_identifiers = {"class": "Tokenizer"}

    @property
    def eod(self) -> int:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A process group of one process, which Megatron's caches need."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of 200 documents of up to eight sentences, in the folder of the vocabulary."""
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    prefix, numbers = str(folder / "sentences"), random.Random(7)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    first = len(SPECIAL) + len(SENTINELS)
    for _ in range(200):
        for _ in range(numbers.randint(1, 8)):
            tokens = [numbers.randrange(first, len(VOCAB)) for _ in range(numbers.randint(1, 30))]
            builder.add_item(torch.tensor(tokens))
        builder.end_document()
    builder.finalize(prefix + ".idx")
    return prefix


def megatron(kind: str, prefix: str, cache: Path) -> Any:
    options = {
        "random_seed": 11,
        "sequence_length": 64,
        "blend": None,
        "blend_per_split": None,
        "split": "1,0,0",
        "path_to_cache": str(cache),
        "tokenizer": Tokenizer(),
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }
    low = IndexedDataset(prefix)
    documents = np.arange(low.document_indices.shape[0] - 1, dtype=np.int32)
    of_split = (documents, SAMPLES, Split.train)
    if kind == "mlm":
        config = BERTMaskedWordPieceDatasetConfig(
            classification_head=True,
            masking_max_ngram=3,
            masking_use_geometric_distribution=False,
            **options,
        )
        return BERTMaskedWordPieceDataset(low, prefix, *of_split, config)
    config = T5MaskedWordPieceDatasetConfig(
        sequence_length_decoder=48,
        masking_max_ngram=10,
        masking_use_geometric_distribution=True,
        **options,
    )
    return T5MaskedWordPieceDataset(low, prefix, *of_split, config)


@pytest.mark.parametrize("kind", ["mlm", "span-corruption"])
def test_all_fields_of_all_samples_match(kind: str, sentences: str, tmp_path: Path) -> None:
    theirs = megatron(kind, sentences, tmp_path / "theirs")
    ours = feedline.open(
        sentences,
        sequence_length=64,
        decoder_sequence_length=48 if kind == "span-corruption" else None,
        num_samples=SAMPLES,
        random_seed=11,
        objective=kind,
        tokenizer=f"wordpiece:{Path(sentences).parent}/vocab.txt",
        path_to_cache=tmp_path / "ours",
    )
    assert len(ours) == SAMPLES <= len(theirs)
    loader = feedline.Loader(ours, micro_batch_size=5)
    seen = set()
    for first, batch in zip(range(0, SAMPLES, 5), loader, strict=True):
        for row in range(5):
            expected = theirs[first + row]
            for name in batch.keys() & expected.keys():
                seen.add(name)
                value = np.asarray(expected[name]).astype(batch[name].dtype)
                np.testing.assert_array_equal(batch[name][row], value, err_msg=name)
    fields = {"mlm": {"text", "types", "labels", "is_random", "padding_mask", "loss_mask"}}
    fields["span-corruption"] = {"text_enc", "text_dec", "labels", "loss_mask"}
    assert fields[kind] <= seen


def test_a_corpus_of_another_objective_is_refused(sentences: str, corpus: str) -> None:
    vocabulary = f"wordpiece:{Path(sentences).parent}/vocab.txt"
    with pytest.raises(ValueError, match="expected a sequence for each sentence"):
        feedline.open(corpus, sequence_length=64, objective="mlm", tokenizer=vocabulary)
    with pytest.raises(ValueError, match="expected three token files"):
        feedline.open(
            sentences,
            sequence_length=64,
            decoder_sequence_length=48,
            objective="encdec",
            tokenizer=vocabulary,
        )


def test_contexts_and_targets_of_cpm2(tmp_path: Path) -> None:
    words = random.Random(3)
    lines = tmp_path / "lines.jsonl"
    with lines.open("w") as out:
        for _ in range(100):
            text = " ".join(words.choices(["one", "two", "three"], k=words.randint(5, 60)))
            out.write(f'{{"text": "{text}"}}\n')
    vocabulary = Path(__file__).parents[3] / "tests/golden/encdec/vocab.txt"
    tokenizer = feedline.Tokenizer(f"encdec:{vocabulary}")
    report = feedline.preprocess(
        lines, tmp_path / "cpm", tokenizer=tokenizer, objective="cpm2", progress=False
    )
    contexts = next(each["name"] for each in report["outputs"] if "_context.bin" in each["name"])
    samples = feedline.open(
        contexts.removesuffix("_context.bin"),
        sequence_length=64,
        decoder_sequence_length=32,
        num_samples=20,
        objective="encdec",
        tokenizer=tokenizer,
    )
    batch = samples.read(range(4))
    assert batch["text_enc"].shape == (4, 64) and batch["text_dec"].shape == (4, 32)
    assert batch["labels"].shape == batch["loss_mask"].shape == (4, 32)
    # The input of the decoder is its labels, shifted by one.
    for row in range(4):
        length = int(batch["loss_mask"][row].sum())
        assert length > 1
        following = batch["text_dec"][row][1:length]
        counts = batch["loss_mask"][row][: length - 1] == 1
        np.testing.assert_array_equal(following[counts], batch["labels"][row][: length - 1][counts])
