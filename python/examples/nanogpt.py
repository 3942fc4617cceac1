"""The loop of nanoGPT. The lines that read with Feedline end with ``# feedline``.

    python nanogpt.py [CORPUS] [--out=FOLDER] [--max_iters=20] [--init_from=resume]
"""

import os
import sys
from itertools import islice

import torch
from demo_corpus import corpus_prefix, output_folder
from tiny_model import TinyGPT, mean_loss

import feedline.torch  # feedline

settings = dict(item[2:].split("=") for item in sys.argv[1:] if item.startswith("--"))
max_iters = int(settings.get("max_iters", 20))
batch_size, block_size, accumulation, eval_interval, eval_iters = 4, 64, 2, 5, 2
corpus, out_dir, device = corpus_prefix(), output_folder(), "cpu"

torch.manual_seed(1337)
model = TinyGPT(length=block_size).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
iter_num = 0
if settings.get("init_from") == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]

# A place in the order is a number of samples; the loop asks for one batch more than it trains on.
batch = {"micro_batch_size": batch_size}
begin = {"samples_consumed": iter_num * accumulation * batch_size}
data = {"sequence_length": block_size, "split": "95,5,0"}
parts = [feedline.open(corpus, index_split=each, **data) for each in ("train", "valid")]  # feedline
feed = feedline.torch.Loader(parts[0], **batch, **begin)  # feedline
held_out = feedline.torch.Batches(parts[1], **batch)  # feedline


def get_batch():
    batch = next(feed)  # feedline
    return batch["tokens"].to(device), batch["labels"].to(device)


@torch.no_grad()
def estimate_loss():
    batches = islice(held_out, eval_iters)  # the same batches each time
    losses = [mean_loss(model(batch["tokens"]), batch["labels"]) for batch in batches]
    return torch.stack(losses).mean().item()


x, y = get_batch()
while iter_num < max_iters:
    for _ in range(accumulation):
        loss = mean_loss(model(x), y) / accumulation
        x, y = get_batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    print(f"iter {iter_num}: loss {loss.item() * accumulation!r}")
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**checkpoint, "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
