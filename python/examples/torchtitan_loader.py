"""torchtitan's data loader. The lines that read with Feedline end with ``# feedline``.

    python torchtitan_loader.py [CORPUS] [--out=FOLDER]

A config of torchtitan's trainer has the one line ``dataloader=...``. Here the loop around it is
written out, with a distributed checkpoint in the middle.
"""

from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from demo_corpus import corpus_prefix, output_folder
from tiny_model import TinyGPT, mean_loss

from feedline.torchtitan import DataLoader  # feedline

dataloader_config = DataLoader.Config(dataset_path=corpus_prefix(), num_samples=80)  # feedline
tokenizer = SimpleNamespace(eos_id=50256)


def build_dataloader(rank, ranks):
    return dataloader_config.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=64, local_batch_size=4
    )


model = TinyGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(dataloader, steps):
    for _, (inputs, labels) in zip(range(steps), dataloader):
        loss = mean_loss(model(inputs["input"]), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f} after {dataloader.state_dict()['samples_consumed']} samples")


# One of two ranks, then one rank alone.
dataloader = build_dataloader(0, 2)
train(dataloader, 4)
dcp.save({"dataloader": dataloader}, checkpoint_id=f"{output_folder()}/step-4", no_dist=True)
dataloader = build_dataloader(0, 1)
dcp.load({"dataloader": dataloader}, checkpoint_id=f"{output_folder()}/step-4", no_dist=True)
train(dataloader, 4)
