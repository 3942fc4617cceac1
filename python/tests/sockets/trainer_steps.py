"""Runs of ``feedline.transformers.Trainer``: ``python trainer_steps.py FOLDER PAUSE_AFTER``.

``python trainer_steps.py FOLDER RANK WORLD STORE`` is one of several ranks. ``STORE`` is a file for
their rendezvous. Each exits with 0 if its checks pass.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_run import Recorder
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from feedline.transformers import Trainer

STEPS = 12
SAVE_STEPS = 5
SAMPLES = 32


def tiny_model() -> GPT2LMHeadModel:
    """A model with dropout: losses depend on the state of the random generator."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (SAMPLES, 16), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in tokens]


def run(
    folder: Path,
    *,
    resume: str | Path | bool | None = None,
    pause_after: int | None = None,
    trainer_type: Any = Trainer,
    trainer_options: dict[str, Any] | None = None,
    model: Any = None,
    **changes: Any,
) -> tuple[dict[int, float], Any]:
    """Trains on shuffled samples; returns the loss of each step, and the trainer."""
    recorder = Recorder(pause_after)
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "warmup_steps": 8,
        "seed": 7,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **changes,
    }
    trainer = trainer_type(
        tiny_model() if model is None else model,
        TrainingArguments(str(folder), **options),
        train_dataset=samples(),
        eval_dataset=samples()[:4],
        callbacks=[recorder],
        **(trainer_options or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return recorder.losses, trainer


def weights(trainer: Any) -> torch.Tensor:
    """All weights in one tensor."""
    values = trainer.model.state_dict().values()
    whole = (v.full_tensor() if hasattr(v, "full_tensor") else v for v in values)
    return torch.cat([value.flatten() for value in whole])


class ShardedTrainer(Trainer):
    """A trainer that shards its model by FSDP2, because accelerate needs a GPU for that."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model.transformer.h[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, *args, **kwargs)
        # The model is not wrapped in DistributedDataParallel.
        self.is_distributed_loading_by_transformers = True


def run_rank(folder: Path, trainer_type: type[Trainer]) -> None:
    """A run, and a run that resumes from a step of it."""
    options = {"async_save": True}
    losses, trainer = run(folder / "whole", trainer_type=trainer_type, trainer_options=options)
    step = str(folder / "whole" / f"step-{SAVE_STEPS:012}")
    resumed, other = run(folder / "resumed", trainer_type=trainer_type, resume=step)
    assert resumed == {step: losses[step] for step in range(SAVE_STEPS + 1, STEPS + 1)}
    assert torch.equal(weights(trainer), weights(other))
    is_sharded = [isinstance(value.data, DTensor) for value in other.model.parameters()]
    assert set(is_sharded) == {trainer_type is ShardedTrainer}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        run(folder, pause_after=int(sys.argv[2]), trainer_options={"async_save": True})
        return
    rank, world, store = sys.argv[2:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    run_rank(folder / "replicas", Trainer)
    run_rank(folder / "sharded", ShardedTrainer)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
