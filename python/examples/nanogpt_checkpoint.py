"""Checkpoints of nanoGPT, which PyTorch's DCP saves. The lines of Feedline end with ``# feedline``.

    python nanogpt_checkpoint.py [CORPUS] [--out=FOLDER] [--max_iters=20] [--init_from=resume]
"""

import sys

import numpy
import torch
import torch.distributed.checkpoint as dcp
from demo_corpus import corpus_prefix, output_folder
from tiny_model import TinyGPT, mean_loss
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from feedline.dcp import StorageReader, StorageWriter  # feedline

settings = dict(item[2:].split("=") for item in sys.argv[1:] if item.startswith("--"))
max_iters = int(settings.get("max_iters", 20))
batch_size, block_size, eval_interval = 4, 64, 10
out_dir, device = output_folder(), "cpu"
data = numpy.memmap(corpus_prefix() + ".bin", numpy.uint16, mode="r")

torch.manual_seed(1337)
model = TinyGPT(length=block_size).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
iter_num = 0


def checkpoint():
    weights, moments = get_state_dict(model, optimizer)
    rest = {"iter_num": iter_num, "rng": torch.get_rng_state()}
    return {"model": weights, "optimizer": moments, **rest}


if settings.get("init_from") == "resume":
    saved = checkpoint()
    dcp.load(saved, storage_reader=StorageReader(out_dir))  # feedline
    weights, moments = saved["model"], saved["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    iter_num = saved["iter_num"]
    torch.set_rng_state(saved["rng"])


def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = numpy.stack([data[i : i + block_size + 1] for i in starts]).astype(numpy.int64)
    tokens = torch.from_numpy(rows).to(device)
    return tokens[:, :-1], tokens[:, 1:]


while iter_num < max_iters:
    x, y = get_batch()
    loss = mean_loss(model(x), y.contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    print(f"iter {iter_num}: loss {loss.item()!r}")
    if iter_num % eval_interval == 0:
        dcp.save(checkpoint(), storage_writer=StorageWriter(out_dir, iter_num))  # feedline
