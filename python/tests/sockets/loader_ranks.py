"""One of two processes that read without ranks: ``python loader_ranks.py CORPUS KIND [RANK STORE]``.

``KIND`` is one of `KINDS`, ``STORE`` a file for the rendezvous. Lightning starts its second process
itself. Each process prints the numbers of the samples that it has read, in JSON, and exits with 0
if its checks pass.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import feedline
import feedline.torch

SAMPLES = 48
MICRO = 4


def open_samples() -> feedline.Dataset:
    return feedline.open(sys.argv[1], sequence_length=32, num_samples=SAMPLES, cache=False)


def loader(**options: Any) -> feedline.torch.Loader:
    return feedline.torch.Loader(open_samples(), micro_batch_size=MICRO, **options)


def numbers(batches: Any, name: str = "tokens") -> list[int]:
    """The numbers of the samples of all batches."""
    rows = torch.cat([batch[name] for batch in batches])
    whole = torch.from_numpy(open_samples().read(range(SAMPLES))["tokens"])
    return [int((whole == row).all(1).nonzero()[0, 0]) for row in rows]


def check(start: Callable[..., Any], corpus: str, folder: Path, kind: str) -> None:
    """Runs both processes: each sample is read once, in chunks of a batch of each rank."""
    arguments = [__file__, corpus, kind]
    if kind == "lightning":
        outputs = [start(*arguments).output()]
    else:
        programs = [start(*arguments, rank, folder / f"store-{kind}") for rank in range(2)]
        outputs = [program.output() for program in programs]
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("[")]
    found = sorted(json.loads(line) for line in lines if line.endswith("]"))
    first = MICRO if kind == "late" else 0
    of_ranks: list[list[int]] = [[], []]
    for batch in range(first, SAMPLES - 2 * MICRO + 1, 2 * MICRO):
        for rank in range(2):
            of_ranks[rank] += range(batch + rank * MICRO, batch + (rank + 1) * MICRO)
    assert found == of_ranks


def report(found: list[int]) -> None:
    # One write, so that lines of two processes that share a pipe are not mixed.
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def plain() -> None:
    """The process group gives the rank, also to the worker of a DataLoader."""
    own = loader()
    assert len(own) == SAMPLES // MICRO // 2
    found = numbers(own)
    assert numbers(feedline.torch.Batches(open_samples(), micro_batch_size=MICRO)) == found
    for context in ("fork", "spawn"):
        options: Any = {"batch_size": None, "multiprocessing_context": context}
        assert numbers(DataLoader(loader(), num_workers=1, **options)) == found
    report(found)


def late() -> None:
    """The ranks are divided from the next batch on, if one was read before they had met."""
    (source,) = EARLY
    assert source.samples_consumed == MICRO
    report(numbers([next(source) for _ in range(5)]))


def refused(match: str) -> None:
    with pytest.raises(ValueError, match=match):
        next(loader())
    rank = dist.get_rank()
    assert numbers(loader(data_parallel_rank=0, data_parallel_size=1))[0] == 0
    assert numbers(loader(data_parallel_rank=rank, data_parallel_size=2))[0] == rank * MICRO


def meshes() -> None:
    """A mesh of all ranks divides samples if FSDP holds it, or if its name is known."""
    from torch.distributed.fsdp import fully_shard

    found = numbers(loader())
    data = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
    assert numbers(loader()) == found
    other = dist.init_device_mesh("cpu", (2,))
    refused("found a DeviceMesh of 2 ranks without names, which FSDP does not hold")
    del other
    gc.collect()
    other = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    refused("found a DeviceMesh of 2 ranks with")
    dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    refused("found a process group of 2 with a subgroup of 1")
    assert [data.ndim, other.ndim, len(list(model.parameters()))] == [1, 1, 2]  # alive until here
    report(found)


def megatron() -> None:
    """Ranks of one tensor-parallel group read the same samples."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    refused("found 2 ranks, 1 data-parallel in Megatron's parallel_state")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    report(numbers(loader()))


def accelerate() -> None:
    """Samples are divided once: by accelerate, or by the loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    own = numbers(accelerator.prepare(loader()))
    source = loader()
    prepared = accelerator.prepare(DataLoader(source, batch_size=None))
    assert len(prepared) == SAMPLES // MICRO // 2
    assert numbers(prepared) == own
    with pytest.raises(ValueError, match="found a DataLoader of accelerate, which reads ahead"):
        source.state_dict()
    assert numbers(prepared) == own
    skipped = accelerator.skip_first_batches(prepared, 2)
    assert numbers(skipped) == own[2 * MICRO :]
    samples = DataLoader(feedline.torch.MapDataset(open_samples()), batch_size=MICRO)
    assert numbers(accelerator.prepare(samples)) == own
    for type_ in (feedline.torch.Loader, feedline.torch.Batches):
        ranks = {"data_parallel_rank": dist.get_rank(), "data_parallel_size": 2}
        twice = type_(open_samples(), micro_batch_size=MICRO, **ranks)
        with pytest.raises(ValueError, match="cannot divide the samples twice.* 2 ranks and 2 proc"):
            next(iter(accelerator.prepare(DataLoader(twice, batch_size=None))))
    alone = feedline.torch.Batches(open_samples(), micro_batch_size=MICRO)
    evaluated = accelerator.prepare(DataLoader(alone, batch_size=None))
    for _ in range(2):
        assert numbers(itertools.islice(evaluated, 2)) == own[: 2 * MICRO]
    report(own)


def trainer() -> None:
    """Hugging Face's Trainer divides the samples by their numbers."""
    from trainer_run import tiny_model
    from transformers import Trainer, TrainingArguments

    from feedline.transformers import CausalLMDataset

    batches = []

    class Recorded(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            batches.append(inputs)
            return super().training_step(model, inputs, *args, **options)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=MICRO,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            dataloader_drop_last=True,
        )
        Recorded(tiny_model(), arguments, train_dataset=CausalLMDataset(open_samples())).train()
    report(numbers(batches, "input_ids"))


def lightning() -> None:
    """Lightning starts the second process when the loader exists, and then the process group."""
    from lightning.pytorch import LightningModule, Trainer

    batches = []

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Embedding(50257, 2)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            batches.append(batch)
            return self.layer(batch["tokens"]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            validated.append(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    validated: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        fitted = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        evaluation = feedline.torch.Batches(open_samples(), micro_batch_size=MICRO)
        fitted.fit(Model(), loader(), evaluation)
    found = numbers(batches)
    # Two batches of the sanity check, then all of this rank.
    assert numbers(validated) == found[: 2 * MICRO] + found
    report(found)


EARLY: list[feedline.torch.Loader] = []
KINDS = {
    each.__name__: each
    for each in (plain, late, meshes, megatron, accelerate, trainer, lightning)
}


def main() -> None:
    torch.set_num_threads(1)
    kind = sys.argv[2]
    if kind == "lightning":
        lightning()
        return
    rank, store = sys.argv[3:]
    if kind == "late":
        EARLY.append(loader())
        assert numbers([next(EARLY[0])]) == [0, 1, 2, 3]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    with pytest.raises(ValueError, match="found WORLD_SIZE=2 and no process group"):
        next(loader())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    KINDS[kind]()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
