"""Checkpoints of Megatron-core. The lines of Feedline end with ``# feedline``.

    python megatron_checkpoint.py [CORPUS] [--out=FOLDER]

A ``pretrain_gpt.py`` of Megatron-LM calls ``feedline.megatron.install()`` before ``pretrain()``
instead. Here is what Megatron-LM does around it.
"""

import os

import numpy
import torch
from demo_corpus import corpus_prefix, output_folder
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from tiny_model import TinyGPT, mean_loss

import feedline.megatron  # feedline

tokens = numpy.fromfile(corpus_prefix() + ".bin", numpy.uint16)[: 80 * 65]
rows = torch.from_numpy(tokens.astype(numpy.int64)).view(20, 4, 65)


class Trainer:
    def __init__(self):
        torch.manual_seed(1)
        self.model = TinyGPT(length=64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.iteration = 0

    def train(self, last):
        for iteration in range(self.iteration, last):
            loss = mean_loss(self.model(rows[iteration, :, :-1]), rows[iteration, :, 1:].clone())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            print(f"iteration {iteration + 1}: lm loss {loss.item():.6f}")
        self.iteration = last

    def sharded_state_dict(self):
        state = {"iteration": self.iteration, "model": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, weight in self.model.named_parameters():
            state["model"][name] = ShardedTensor.from_rank_offsets(name, weight.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                moment = self.optimizer.state[weight].get(key, torch.zeros_like(weight))
                place = f"optimizer.state.{key}.{name}"
                state[key][name] = ShardedTensor.from_rank_offsets(place, moment)
        state["rng"] = ShardedObject("rng_state", torch.get_rng_state(), (1,), (0,))
        return state

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.iteration = state["iteration"]
        for name, weight in self.model.named_parameters():
            moments = {key: state[key][name] for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.tensor(float(self.iteration)), **moments}
        torch.set_rng_state(state["rng"])


torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
folder = f"{output_folder()}/iter_{10:07}"
os.makedirs(folder)

trainer = Trainer()
trainer.train(10)
save_strategy = feedline.megatron.SaveStrategy()  # feedline
dist_checkpointing.save(trainer.sharded_state_dict(), folder, save_strategy)
trainer.train(20)

resumed = Trainer()
load_strategy = feedline.megatron.LoadStrategy()  # feedline
state = dist_checkpointing.load(resumed.sharded_state_dict(), folder, load_strategy)
resumed.load_state_dict(state)
resumed.train(20)
assert all(map(torch.equal, trainer.model.parameters(), resumed.model.parameters()))
print(f"resumed from {folder}")
torch.distributed.destroy_process_group()
