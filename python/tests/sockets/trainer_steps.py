"""Runs of ``feedline.transformers.Trainer``: ``python trainer_steps.py FOLDER PAUSE_AFTER``.

``python trainer_steps.py FOLDER RANK WORLD STORE KIND...`` is one of several ranks. ``STORE`` is a
file for their rendezvous, ``KIND`` one of the models. Each exits with 0 if its checks pass.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_run import Recorder
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments

import feedline._hf
from feedline.dcp import StorageWriter
from feedline.transformers import Trainer, save_config

STEPS = 12
SAVE_STEPS = 5
SAMPLES = 32


def tiny_model(positions: int = 16) -> GPT2LMHeadModel:
    """A model with dropout: losses depend on the state of the random generator."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=positions,
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
    return weights_of(trainer.model)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    """All weights of a model in one tensor."""
    values = model.state_dict().values()
    whole = (v.full_tensor() if hasattr(v, "full_tensor") else v for v in values)
    return torch.cat([value.flatten() for value in whole])


def shard(model: Any) -> None:
    """Shards a model by FSDP2, with a part of it inside."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    inside = next(module for module in model.modules() if type(module).__name__ == "GPT2Block")
    fully_shard(inside, mesh=mesh)
    fully_shard(model, mesh=mesh)


class ShardedTrainer(Trainer):
    """A trainer that shards its model by FSDP2, because accelerate needs a GPU for that."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        shard(model)
        super().__init__(model, *args, **kwargs)
        # The model is not wrapped in DistributedDataParallel.
        self.is_distributed_loading_by_transformers = True


def run_rank(folder: Path, trainer_type: type[Trainer], make: Any = tiny_model) -> None:
    """A run, and a run that resumes from a step of it."""
    options: dict[str, Any] = {"trainer_options": {"async_save": True}}
    options["trainer_type"] = trainer_type
    losses, trainer = run(folder / "whole", model=make(), **options)
    step = str(folder / "whole" / f"step-{SAVE_STEPS:012}")
    resumed, other = run(folder / "resumed", model=make(), resume=step, **options)
    assert resumed == {step: losses[step] for step in range(SAVE_STEPS + 1, STEPS + 1)}
    assert torch.equal(weights(trainer), weights(other))
    is_sharded = [isinstance(value.data, DTensor) for value in other.model.parameters()]
    assert set(is_sharded) == {trainer_type is ShardedTrainer}
    expected = weights(trainer)
    last = folder / "whole" / f"step-{STEPS:012}"
    if make is lora_model:
        from peft import PeftModel

        opened = PeftModel.from_pretrained(tiny_model(), last)
    else:
        opened = AutoModelForCausalLM.from_pretrained(last)
        assert opened.config.architectures == ["GPT2LMHeadModel"]
        # Each rank has written its share.
        assert len(list(last.glob("model-*-of-00002.safetensors"))) == 2
    assert torch.equal(weights_of(opened), expected)


def lora_model() -> Any:
    """A model with adapters of PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    options = {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"]}
    return get_peft_model(tiny_model(), LoraConfig(r=2, fan_in_fan_out=True, **options))


def save_pieces(folder: Path) -> None:
    """A step of a sharded model that DCP saves in pieces, and that transformers opens."""
    model = tiny_model()
    expected = weights_of(model)
    shard(model)
    state = {n: v for n, v in model.state_dict().items() if n != "lm_head.weight"}
    dcp.save({"model": state}, storage_writer=StorageWriter(folder, 1))
    if torch.distributed.get_rank() == 0:
        step = folder / f"step-{1:012}"
        assert not list(step.glob("*.index.json"))
        feedline._hf._FILE_BYTES_MAX = 2000  # several files
        save_config(model, step)
        assert len(list(step.glob("joined-*.safetensors"))) > 2
        opened = AutoModelForCausalLM.from_pretrained(step)
        assert torch.equal(weights_of(opened), expected)


KINDS = {
    "replicas": lambda folder: run_rank(folder, Trainer),
    "sharded": lambda folder: run_rank(folder, ShardedTrainer),
    "adapters": lambda folder: run_rank(folder, ShardedTrainer, lora_model),
    "pieces": save_pieces,
}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        run(folder, pause_after=int(sys.argv[2]), trainer_options={"async_save": True})
        return
    rank, world, store, *kinds = sys.argv[2:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    for kind in kinds:
        KINDS[kind](folder / kind)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
