"""torchtitan's checkpoints. The lines that name Feedline end with ``# feedline``.

    python torchtitan_checkpoint.py [CORPUS] [--out=FOLDER]

A config of torchtitan's trainer has the lines ``checkpoint=...`` and ``dataloader=...``. Here the
loop around them is written out. ``feedline ckpt verify FOLDER/checkpoint`` reads what it saves.
"""

from types import SimpleNamespace

import torch
from demo_corpus import corpus_prefix, output_folder
from tiny_model import TinyGPT, mean_loss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from feedline.torchtitan import CheckpointManager, DataLoader  # feedline

checkpoint_config = CheckpointManager.Config(enable=True, interval=5, keep_latest_k=2)  # feedline
dataloader_config = DataLoader.Config(dataset_path=corpus_prefix(), num_samples=80)  # feedline
adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})


class Trainer:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.step = 0
        self.model = TinyGPT()
        self.optimizers = OptimizersContainer.Config(
            param_groups=[adamw], implementation="foreach"
        ).build(model_parts=[self.model])
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.dataloader = dataloader_config.build(
            dp_world_size=1, dp_rank=0, seq_len=64, local_batch_size=4,
            tokenizer=SimpleNamespace(eos_id=50256),
        )
        self.checkpointer = checkpoint_config.build(
            dataloader=self.dataloader, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers, states={"train_state": self}, sd_adapter=None,
            base_folder=output_folder(),
        )

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"])

    def train(self, steps):
        losses = []
        self.checkpointer.load()
        batches = iter(self.dataloader)
        while self.step < steps:
            inputs, labels = next(batches)
            loss = mean_loss(self.model(inputs["input"]), labels)
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.lr_schedulers.step()
            self.step += 1
            losses.append(loss.item())
            print(f"step {self.step}: loss {losses[-1]:.6f}")
            self.checkpointer.save(self.step)
        self.checkpointer.close()
        return losses


losses = Trainer(seed=1).train(8)
# Another process would do the same: nothing of the first one is in the second.
resumed = Trainer(seed=2).train(8)
assert resumed == losses[-3:]
print("resumed after step 5 with the same losses")
