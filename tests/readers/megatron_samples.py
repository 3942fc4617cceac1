"""Prints the samples of Megatron's own GPT, BERT and T5 datasets, as one JSON object.

    python3 megatron_samples.py > tests/golden/samples/megatron.json

It writes two corpora of random tokens into a temporary folder with Megatron's builder, opens them
with Megatron's datasets in several settings, and reads all samples of each. For every case it
prints the settings, the first samples, and a hash of each field of all samples by `fold`.
`loader/tests/it/samples.rs` creates the same corpora and hashes its samples.

It needs megatron-core, numpy and PyTorch (the CPU is enough).
"""

import json
import sys
import tempfile

import numpy
import torch

torch.distributed.get_rank = lambda *_args, **_named: 0  # there is one process and no process group

from megatron.core.datasets.bert_dataset import (  # noqa: E402
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: E402
from megatron.core.datasets.t5_dataset import (  # noqa: E402
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.utils import Split  # noqa: E402

MASK64 = (1 << 64) - 1
WHOLE_SAMPLES = 2


class Random:
    """The random generator of the tests."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, limit: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & MASK64
        return (self.state >> 33) % limit


def fold(folded: int, values) -> int:
    """FNV-1a of 64 bits over values."""
    for value in values:
        folded = ((folded ^ (int(value) & MASK64)) * 0x100000001B3) & MASK64
    return folded


class Tokenizer:
    """Ids 0 to 399; those from 10 on that are multiples of 3 continue a word."""

    vocab_size = 400
    inv_vocab = {token: ("##" if token >= 10 and token % 3 == 0 else "") + str(token) for token in range(400)}
    cls, sep, mask, bos, eos, eod = 1, 2, 3, 4, 5, 7
    additional_special_tokens_ids = list(range(370, 400))
    unique_identifiers = {"class": "Tokenizer"}

    def __init__(self, pad: int) -> None:
        self.pad = pad


def write_corpus(prefix: str, seed: int, sentences_max: int, tokens_max: int, eod: bool) -> None:
    """300 documents of up to `sentences_max` sentences of up to `tokens_max` tokens."""
    random = Random(seed)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
    for _ in range(300):
        for _ in range(1 + random.below(sentences_max)):
            tokens = [random.below(370) for _ in range(random.below(tokens_max))]
            if eod:
                tokens.append(Tokenizer.eod)
            builder.add_item(torch.tensor(tokens, dtype=torch.int64))
        builder.end_document()
    builder.finalize(prefix + ".idx")


def case(dataset, settings: dict) -> dict:
    folded, count = {}, len(dataset)
    for sample in (dataset[number] for number in range(count)):
        for field, values in sample.items():
            values = numpy.asarray(values).astype(numpy.int64).reshape(-1)
            folded[field] = fold(folded.get(field, 0xCBF29CE484222325), values)
    whole = [
        {field: numpy.asarray(values).astype(numpy.int64).reshape(-1).tolist() for field, values in dataset[n].items()}
        for n in range(WHOLE_SAMPLES)
    ]
    for sample in whole:
        sample.pop("attention_mask", None)
    folded = {field: f"{value:016x}" for field, value in folded.items()}
    return {"settings": settings, "samples": count, "folded": folded, "first": whole}


def gpt(folder: str, settings: dict) -> dict:
    given = dict(settings)
    pad, part = given.pop("pad"), Split[given.pop("part")]
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=24, blend=None, blend_per_split=None, split="90,10,0",
        path_to_cache=folder + "/cache-gpt-" + str(abs(hash(str(settings)))),
        tokenizer=Tokenizer(pad), create_attention_mask=True, **given,
    )
    low = IndexedDataset(folder + "/gpt")
    edge = round(0.9 * len(low))
    indices = numpy.arange(0, edge) if part is Split.train else numpy.arange(edge, len(low))
    dataset = GPTDataset(low, folder + "/gpt", indices.astype(numpy.int32), 700 if part is Split.train else None, part, config)
    return case(dataset, settings)


def masked(folder: str, kind: str, settings: dict) -> dict:
    given = dict(settings)
    pad = given.pop("pad")
    common = dict(
        random_seed=settings.get("random_seed", 1234), blend=None, blend_per_split=None, split="100,0,0",
        path_to_cache=folder + f"/cache-{kind}-" + str(abs(hash(str(settings)))),
        tokenizer=Tokenizer(pad), masking_do_permutation=False, short_sequence_probability=0.1,
    )
    common.update(given)
    low = IndexedDataset(folder + "/sentences")
    indices = numpy.arange(0, low.document_indices.shape[0] - 1, dtype=numpy.int32)
    if kind == "bert":
        config = BERTMaskedWordPieceDatasetConfig(**common)
        dataset = BERTMaskedWordPieceDataset(low, folder + "/sentences", indices, 1500, Split.train, config)
    else:
        config = T5MaskedWordPieceDatasetConfig(**common)
        dataset = T5MaskedWordPieceDataset(low, folder + "/sentences", indices, 1500, Split.train, config)
    return case(dataset, settings)


def main() -> None:
    gpt_settings = [
        {"part": part, "pad": pad, "add_extra_token_to_sequence": extra, "drop_last_partial_validation_sequence": False,
         "reset_position_ids": positions, "reset_attention_mask": attention, "eod_mask_loss": loss}
        for part, pad, extra, positions, attention, loss in [
            ("train", 6, True, False, False, False),
            ("train", 6, True, True, True, True),
            ("train", 7, True, True, False, True),  # the id of EOD: Megatron pads with -1
            ("train", 6, False, False, True, False),
            ("valid", 6, True, True, True, True),  # the last sample is short
            ("valid", 7, False, True, True, False),
        ]
    ]
    ngrams = [
        # probability, longest, full words, longer, geometric
        (0.15, 3, True, False, False),
        (0.15, 10, True, False, True),
        (0.3, 4, False, True, False),
        (0.5, 12, True, True, False),
        (0.1, 1, False, False, False),
    ]

    def masking(probability, longest, words, longer, geometric) -> dict:
        return {"masking_probability": probability, "masking_max_ngram": longest, "masking_do_full_word": words,
                "masking_use_longer_ngrams": longer, "masking_use_geometric_distribution": geometric}

    bert_settings = [
        {"pad": pad, "sequence_length": 64, "classification_head": head, "random_seed": seed, **masking(*ngram)}
        for ngram, pad, head, seed in zip(ngrams, (0, 0, 5, 0, 0), (True, True, False, True, False), (1234, 1, 2, 2147483000, 5))
    ]
    t5_settings = [
        {"pad": pad, "sequence_length": 72, "sequence_length_decoder": 80, "random_seed": seed, **masking(*ngram)}
        for ngram, pad, seed in zip(ngrams[:3] + ngrams[4:], (0, 0, 5, 0), (1234, 1, 2, 2147483000))
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder + "/gpt", 1, 1, 60, True)
        write_corpus(folder + "/sentences", 2, 8, 30, False)
        json.dump(
            {
                "gpt": [gpt(folder, settings) for settings in gpt_settings],
                "bert": [masked(folder, "bert", settings) for settings in bert_settings],
                "t5": [masked(folder, "t5", settings) for settings in t5_settings],
            },
            sys.stdout,
        )
        print()


if __name__ == "__main__":
    main()
