"""A GPT-2 in PyTorch eager, as one writes it: what `scripts/bench_trainer.py` measures beside.

Prints one JSON line: seconds and CPU seconds of each step. Attention is SDPA, AdamW the fused one,
the loss cross_entropy over all logits; bf16 is autocast with f32 weights. With `compile`, the model
is compiled by `torch.compile`.
"""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x):
        rows, columns, hidden = x.shape
        parts = self.qkv(self.norm_1(x)).split(hidden, dim=2)
        q, k, v = (p.view(rows, columns, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, columns, hidden))
        inner = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + self.down(inner)


class Gpt(nn.Module):
    def __init__(self, shape):
        super().__init__()
        vocab = (shape["vocab"] + 127) // 128 * 128
        hidden = shape["hidden"]
        self.words = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(shape["seq_len"], hidden)
        blocks = (Block(hidden, shape["heads"], 4 * hidden) for _ in range(shape["layers"]))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.words.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def main():
    shape = json.loads(sys.argv[1])
    torch.manual_seed(1)
    torch.set_num_threads(shape["threads"])
    device = torch.device(shape.get("device", "cpu"))
    model = Gpt(shape).to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    compiled = torch.compile(model) if shape.get("compile") else model
    adamw = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    passes = shape["global"] // shape["micro"]
    size = (shape["micro"], shape["seq_len"])
    wall, cpu = [], []
    for _ in range(shape["steps"]):
        started = time.perf_counter(), time.process_time()
        for _ in range(passes):
            tokens = torch.randint(shape["vocab"], size, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=shape["dtype"] == "bf16"):
                loss = compiled(tokens, tokens.roll(-1, 1)) / passes
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    print(json.dumps({"wall": wall, "cpu": cpu}))


main()
