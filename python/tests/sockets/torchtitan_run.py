"""A run with the components of torchtitan's trainer, which cannot be imported with torch 2.11.

``python torchtitan_run.py CORPUS FOLDER save|load RANK WORLD STORE`` is one of its ranks. ``STORE``
is a file for the rendezvous of the ranks. Each exits with 0 if its checks pass.
"""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

import feedline.torchtitan
from feedline import ckpt

VOCABULARY = 211
GLOBAL_BATCH = 4


class Model(torch.nn.Module):
    """Logits of the next tokens: int64 ``[batch, length]`` to ``[batch, length, VOCABULARY]``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, 10)
        self.hidden = torch.nn.Linear(10, 14)
        self.head = torch.nn.Linear(14, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.relu(self.hidden(self.tokens(tokens))))
        return logits


class TrainState:
    """The counters of torchtitan's trainer."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Run:
    """The components that the trainer builds from its config, and its loop."""

    def __init__(
        self,
        corpus: str,
        folder: object,
        *,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        manager: Any = feedline.torchtitan.CheckpointManager,
        adapter: Any = None,
        **config: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        if ranks > 1:
            fully_shard(self.model.hidden)
            fully_shard(self.model)
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
        )
        self.optimizers = OptimizersContainer.Config(
            param_groups=[group], implementation="for-loop"
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.dataloader = feedline.torchtitan.DataLoader.Config(
            dataset_path=corpus, num_samples=80
        ).build(
            dp_world_size=ranks,
            dp_rank=rank,
            tokenizer=SimpleNamespace(eos_id=50256),
            seq_len=16,
            local_batch_size=GLOBAL_BATCH // ranks,
        )
        self.state = TrainState()
        self.manager = manager.Config(enable=True, folder="ckpt", **config).build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=adapter,
            base_folder=str(folder),
        )

    def train(self, until: int, last: int | None = None) -> list[float]:
        """Trains up to a step and saves as configured; returns the losses."""
        losses = []
        batches = iter(self.dataloader)
        while self.state.step < until:
            inputs, labels = next(batches)
            logits = self.model(inputs["input"] % VOCABULARY)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten() % VOCABULARY
            )
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.state.step += 1
            self.manager.save(self.state.step, last_step=self.state.step == last)
            losses.append(loss.item())
        return losses

    def everything(self) -> dict[str, Any]:
        """The complete state that a resumed run must have, as copies of full tensors."""
        found = {
            **self.model.state_dict(),
            **self.optimizers.state_dict(),
            **self.schedulers.state_dict(),
            **self.dataloader.state_dict(),
            **self.state.state_dict(),
        }
        return {name: whole(value) for name, value in found.items()}


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def save(corpus: str, folder: str, rank: int, world: int) -> None:
    """Saves in threads. The expected states are stored in the same folder, for `load`."""
    run = Run(corpus, folder, rank=rank, ranks=world, interval=2, async_mode="async")
    for step in (2, 4):
        run.train(step)
        expected = run.everything()
        if rank == 0:
            torch.save(expected, f"{folder}/expected-{step}.pt")
    run.manager.close()


def load(corpus: str, folder: str, rank: int, world: int) -> None:
    """Loads both steps, and continues from the newer one."""
    run = Run(corpus, folder, rank=rank, ranks=world, seed=rank + 1, interval=2, load_only=True)
    for step in (2, -1):
        assert run.manager.load(step)
        expected = torch.load(f"{folder}/expected-{run.state.step}.pt")
        assert_equal(run.everything(), expected)
    assert len(run.train(6)) == 2
    save_in_process(corpus, f"{folder}/process")


def save_in_process(corpus: str, folder: str) -> None:
    """Changes the state while another process saves it."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    config = {"interval": 2, "async_mode": "async_with_pinned_mem", "keep_latest_k": 2}
    run = Run(corpus, folder, **config)
    expected = {}
    for step in (2, 4, 6):
        run.train(step)
        run.manager.maybe_wait_for_staging()
        expected[step] = run.everything()
    run.train(7)
    run.manager.close()
    assert [line["step"] for line in ckpt.ls(f"{folder}/ckpt")["steps"]] == [4, 6]
    for step in (4, 6):
        again = Run(corpus, folder, seed=1, load_only=True)
        assert again.manager.load(step)
        assert_equal(again.everything(), expected[step])


def main() -> None:
    corpus, folder, verb, store = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[6]
    rank, world = int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    {"save": save, "load": load}[verb](corpus, folder, rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
