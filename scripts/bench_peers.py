#!/usr/bin/env python3
"""Runs one peer of Feedline's tokenizer on one file; prints its times as JSON.

    bench_peers.py gigatoken VOCAB_DIR FILE.jsonl        encode the file, keep the ids in memory
    bench_peers.py hf VOCAB_DIR FILE.jsonl               Hugging Face tokenizers, one batch of all texts
    bench_peers.py megatron VOCAB_DIR FILE.jsonl OUT     the steps of Megatron's preprocess_data_fast.py
    bench_peers.py program VOCAB_DIR FILE.jsonl OUT      the same with imports in a spawned worker
    bench_peers.py sentencepiece MODEL FILE.jsonl        the C++ library, one thread
    bench_peers.py encdec VOCAB.txt FILE.jsonl           CPM-2's tokenizer in Python
    bench_peers.py train MODEL KIND FILE.jsonl           trains a model of 16,000 pieces: unigram or bpe
    bench_peers.py corpus ZST FOLDER                     English and Chinese texts of the demo's corpus
    bench_peers.py repeat FILE.jsonl OUT BYTES           repeats its lines, shuffled, up to BYTES

VOCAB_DIR has vocab.json and merges.txt, from `preprocess --export-vocab`. Seconds exclude imports,
loading the vocabulary and parsing JSON, except where the peer itself reads the file.
"""

import json
import os
import pathlib
import random
import sys
import time
import types

EOD = 50256
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Clock:
    """Wall time and CPU time of this process."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self):
        return {
            "seconds": time.perf_counter() - self.wall,
            "cpu_seconds": time.process_time() - self.cpu,
        }


def print_json(**found):
    json.dump(found, sys.stdout)


def texts(file):
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def gpt2(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = pathlib.Path(folder)
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    tokenizer = Tokenizer(models.BPE.from_file(*files))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode_with_gigatoken(folder, file):
    from gigatoken import JsonlFileSource, Tokenizer

    tokenizer = Tokenizer.from_json(gpt2(folder).to_str())
    clock = Clock()
    encoded = tokenizer.encode_files(JsonlFileSource([file], field="text"))
    return encoded, clock


def gigatoken(folder, file):
    encoded, clock = encode_with_gigatoken(folder, file)
    took = clock.stop()
    import awkward

    print_json(**took, documents=len(encoded), tokens=int(awkward.sum(awkward.num(encoded))))


def hf(folder, file):
    tokenizer, batch = gpt2(folder), texts(file)
    clock = Clock()
    encoded = tokenizer.encode_batch_fast(batch)
    print_json(**clock.stop(), documents=len(batch), tokens=sum(len(ids) for ids in encoded))


def megatron(folder, file, out):
    """Encode the file, append EOD to every document, write all ids, then megatron-core's index.

    The package of megatron-core is older than that program, so its two steps before the index are
    implemented here, with numpy, in one process and without a copy for every document. So the time
    is a lower bound of the program's.
    """
    import numpy

    builder = megatron_builder()(f"{out}.bin", dtype=numpy.uint16)
    took, documents, tokens = megatron_steps(builder, folder, file, out)
    print_json(**took, documents=documents, tokens=tokens)


def megatron_steps(builder, folder, file, out):
    import awkward
    import numpy

    encoded, clock = encode_with_gigatoken(folder, file)
    ends = awkward.singletons(awkward.Array(numpy.full(len(encoded), EOD, dtype=numpy.uint32)))
    encoded = awkward.concatenate([encoded, ends], axis=1)
    lengths = awkward.num(encoded).tolist()
    ids = awkward.to_numpy(awkward.flatten(encoded)).astype(numpy.uint16)
    builder.data_file.write(ids.tobytes(order="C"))
    builder.sequence_lengths.extend(lengths)
    builder.document_indices.extend(range(1, len(lengths) + 1))
    builder.finalize(f"{out}.idx")
    return clock.stop(), len(lengths), len(ids)


def program(folder, file, out):
    """The steps above in a spawned worker, as in the program, so that the parent and the worker both
    import its modules. Those of `megatron.training` are omitted: no package has them.
    """
    import multiprocessing

    imports_of_the_program()
    with multiprocessing.get_context("spawn").Pool(processes=1) as pool:
        documents, tokens = pool.apply(program_worker, (folder, file, out))
    print_json(documents=documents, tokens=tokens)


def program_worker(folder, file, out):
    import numpy

    builder = imports_of_the_program()(f"{out}.bin", dtype=numpy.uint16)
    return megatron_steps(builder, folder, file, out)[1:]


def imports_of_the_program():
    import awkward  # noqa: F401
    import gigatoken  # noqa: F401
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.tokenizers import MegatronTokenizer  # noqa: F401

    return IndexedDatasetBuilder


def megatron_builder():
    """Megatron's builder. PyTorch, of which it only imports names, is replaced by an empty module."""

    def module(name, **names):
        made = types.ModuleType(name)
        made.__dict__.update(names)
        sys.modules[name] = made
        return made

    data = module("torch.utils.data", Dataset=object)
    distributed = module("torch.distributed", is_initialized=lambda: False)
    module("torch", utils=module("torch.utils", data=data), distributed=distributed, Tensor=object)
    import importlib.util

    found = importlib.util.find_spec("megatron")
    root = pathlib.Path(next(iter(found.submodule_search_locations))) / "core"
    module("megatron.core", __path__=[str(root)])
    module("megatron.core.datasets", __path__=[str(root / "datasets")])
    module("megatron.core.utils", log_single_rank=lambda *_args, **_named: None)
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    return IndexedDatasetBuilder


def sentencepiece(model, file):
    from sentencepiece import SentencePieceProcessor

    processor, batch = SentencePieceProcessor(model_file=model), texts(file)
    clock, tokens = Clock(), 0
    for text in batch:
        tokens += len(processor.encode(text))
    print_json(**clock.stop(), documents=len(batch), tokens=tokens)


def encdec(vocab, file):
    sys.path.insert(0, str(ROOT / "preprocess/benches/peers"))
    import jieba
    from encdec_python import EncDec

    tokenizer, batch = EncDec(vocab), texts(file)
    jieba.initialize()
    clock, tokens = Clock(), 0
    for text in batch:
        tokens += len(tokenizer.encode(text))
    print_json(**clock.stop(), documents=len(batch), tokens=tokens)


def train(model, kind, file):
    from sentencepiece import SentencePieceTrainer

    lines = (line for text in texts(file) for line in text.splitlines() if line.strip())
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=model.removesuffix(".model"),
        model_type=kind,
        vocab_size=16_000,
        byte_fallback=True,
        input_sentence_size=200_000,
        shuffle_input_sentence=True,
        num_threads=len(os.sched_getaffinity(0)),
        minloglevel=2,
    )
    print_json()


def corpus(packed, folder):
    import zstandard

    parts = {"en": [], "zh": []}
    with zstandard.open(packed, "rt", encoding="utf-8") as lines:
        for line in lines:
            poem = json.loads(line)["source"].startswith("chinese-poetry")
            parts["zh" if poem else "en"].append(line)
    for kind, lines in parts.items():
        (pathlib.Path(folder) / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
    print_json(**{kind: len(lines) for kind, lines in parts.items()})


def repeat(file, out, size):
    lines = pathlib.Path(file).read_bytes().splitlines(keepends=True)
    rng, bytes_left = random.Random(7), int(size)
    with open(out, "wb") as to:
        while bytes_left > 0:
            for line in lines:
                to.write(line)
                bytes_left -= len(line)
                if bytes_left <= 0:
                    break
            rng.shuffle(lines)
    print_json()


PEERS = {
    peer.__name__: peer
    for peer in (gigatoken, hf, megatron, program, sentencepiece, encdec, train, corpus, repeat)
}

if __name__ == "__main__":
    PEERS[sys.argv[1]](*sys.argv[2:])
