"""Prints hashes of the samples of Megatron's datasets for the runs of `tests/golden/gpt_cache`.

    python3 megatron_stream.py tests/golden/gpt_cache > tests/golden/gpt_cache/streams.json

    {"RUN": {"samples": S, "sha256": of all samples of the training part, in their order}}

The hash is over the tokens and then the labels of each sample, as little-endian int64. It needs
megatron-core and PyTorch.
"""

import hashlib
import json
import os
import sys
import tempfile

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


class Tokenizer:
    """The attributes that a dataset needs; pad differs from every token."""

    unique_identifiers = {"class": "stand-in"}
    vocab_size = 60001
    eod = 50256
    pad = 60000


def stream(folder: str, run: dict, cache: str) -> dict:
    prefixes, weights = run["blend"]
    prefixes = [os.path.join(folder, prefix) for prefix in prefixes]
    extra = {name: value == "True" for name, value in run["extra"].items()}
    config = GPTDatasetConfig(
        random_seed=run["random_seed"],
        sequence_length=run["sequence_length"],
        blend=(prefixes, weights),
        split=run["split"],
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mmap_bin_files=True,
        **extra,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, run["sizes"], lambda: True, config).build()
    digest, samples = hashlib.sha256(), len(built[0])
    for sample in map(built[0].__getitem__, range(samples)):
        for name in ("tokens", "labels"):
            digest.update(sample[name].numpy().astype("<i8").tobytes())
    return {"samples": samples, "sha256": digest.hexdigest()}


def main() -> None:
    folder = os.path.abspath(sys.argv[1])
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        runs = json.load(file)["runs"]
    with tempfile.TemporaryDirectory() as cache:
        # The builder needs a process group, here of one process.
        rendezvous = "file://" + os.path.join(cache, "rendezvous")
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        found = {
            name: stream(folder, run, os.path.join(cache, name))
            for name, run in runs.items()
            if not run["extra"]
        }
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
