"""Prints the samples of CPM-2's own EncDecDataset, as one JSON object.

    python3 cpm2_samples.py CHECKOUT > tests/golden/samples/cpm2.json

CHECKOUT is a clone of the repository CPM-2-Pretrain of TsinghuaAI. Its dataset and the function of
its training program for masks and positions run unchanged; modules that they import but do not need
are replaced by mocks. The documents are random, and their index is built here by the rules of
`_build_index_mappings` for one epoch. For every case it prints the settings, the first samples, and
a hash of each field of all samples, as `megatron_samples.py` does.

It needs numpy and PyTorch (the CPU is enough).
"""

import importlib
import json
import sys
import types
import unittest.mock

import numpy
import torch

MASK64 = (1 << 64) - 1
VOCAB, EOD, PAD, SENTINEL = 1000, 7, 5, 810


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
    vocab_size, eod_id, pad_id = VOCAB, EOD, PAD

    @staticmethod
    def get_sentinel_id(nth: int) -> int:
        assert nth < 190
        return SENTINEL + nth


class Sequences:
    """A dataset in memory, with the read method of the original."""

    def __init__(self, sequences: list) -> None:
        self.sequences = [numpy.array(sequence, dtype=numpy.uint16) for sequence in sequences]
        self.sizes = numpy.array([len(sequence) for sequence in sequences], dtype=numpy.int32)

    def get(self, nth: int, offset: int = 0, length=None):
        sequence = self.sequences[nth]
        return sequence[offset : len(sequence) if length is None else offset + length]


def triple(seed: int) -> tuple:
    """150 documents of 2 to 25 visible spans and as many hidden ones."""
    random, contexts, targets, offsets = Random(seed), [], [], []
    tokens = lambda count: [20 + random.below(780) for _ in range(count)]  # noqa: E731
    for _ in range(150):
        context, target, offset = [], [], []
        spans = 2 + random.below(24)
        for nth in range(spans):
            context += tokens(1 + random.below(8)) + [VOCAB + nth]
            noise = [VOCAB + nth] + tokens(1 + random.below(5))
            noise += [EOD] if nth == spans - 1 else []
            offset += [len(target), len(noise)]
            target += noise
        contexts.append(context), targets.append(target), offsets.append(offset)
    return Sequences(contexts), Sequences(targets), Sequences(offsets)


def index(sizes, seq_len: int, seed: int) -> tuple:
    rng = numpy.random.RandomState(seed=seed)
    documents = numpy.arange(len(sizes), dtype=numpy.int32)
    rng.shuffle(documents)
    samples = (int(sizes.sum()) - 1) // seq_len
    rows, place, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        left = seq_len + 1
        while left:
            here = int(sizes[documents[place]]) - offset
            left -= here
            if left <= 0:
                offset += left + here - 1
                left = 0
            else:
                place, offset = place + 1, 0
        rows.append((place, offset))
    shuffle = numpy.arange(samples, dtype=numpy.uint32)
    rng.shuffle(shuffle)
    return documents, numpy.array(rows, dtype=numpy.int32), shuffle


def original(checkout: str) -> tuple:
    """The dataset class and the function of the masks."""
    sys.path.insert(0, checkout + "/src")
    for name in ("data_utils", "data_utils.tokenization_enc_dec", "utils", "mpu", "deepspeed", "tokenization_enc_dec",
                 "fp16", "learning_rates", "model", "apex", "apex.optimizers", "samplers", "arguments", "tqdm",
                 "data.indexed_dataset"):
        sys.modules[name] = unittest.mock.MagicMock()
    data = types.ModuleType("data")
    data.__path__ = [checkout + "/src/data"]
    sys.modules["data"] = data
    dataset = importlib.import_module("data.enc_dec_dataset").EncDecDataset
    return dataset, importlib.import_module("pretrain_enc_dec").get_masks_and_position_ids


def fields(sample: dict, masks, reset: bool) -> dict:
    batch = {name: torch.from_numpy(values).long().unsqueeze(0) for name, values in sample.items()}
    args = types.SimpleNamespace(fp16=False)
    model, other = masks(args, Tokenizer, batch["contexts"], batch["targets"], batch["labels"], batch["ctx_eod_mask"], reset, reset)
    made = dict(batch, **model, **other)
    for name in ("enc_attention_mask", "dec_attention_mask", "cross_attention_mask"):
        made[name] = made[name] < 0.5
    return {name: values.long().reshape(-1).tolist() for name, values in made.items()}


def main() -> None:
    dataset_class, masks = original(sys.argv[1])
    context, target, offset = triple(3)
    cases = []
    for encoder_len, decoder_len, reset in ((48, 128, True), (48, 40, False), (17, 64, True)):
        dataset = object.__new__(dataset_class)
        dataset.context_indexed_dataset, dataset.target_indexed_dataset = context, target
        dataset.target_offset_dataset, dataset.tokenizer = offset, Tokenizer
        dataset.enc_seq_length, dataset.dec_seq_length = encoder_len, decoder_len
        dataset.doc_idx, dataset.sample_idx, dataset.shuffle_idx = index(context.sizes, encoder_len - 1, 1234)
        folded, first = {}, []
        for nth in range(len(dataset.shuffle_idx)):
            made = fields(dataset[nth], masks, reset)
            for name, values in made.items():
                folded[name] = fold(folded.get(name, 0xCBF29CE484222325), values)
            if nth < 2:
                first.append({name: made[name] for name in ("contexts", "targets", "labels")})
        settings = {"encoder_len": encoder_len, "decoder_len": decoder_len, "reset": reset}
        folded = {name: f"{value:016x}" for name, value in folded.items()}
        cases.append({"settings": settings, "samples": len(dataset.shuffle_idx), "folded": folded, "first": first})
    json.dump({"encdec": cases}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
