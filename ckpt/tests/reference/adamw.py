#!/usr/bin/env python3
"""adamw.py OUT: what libtorch's fused AdamW makes of given numbers on this processor, as
adamw.safetensors, whose __metadata__ has the arguments of each case. Made by torch 2.11.0 on a
processor with FMA, with one thread:

    OMP_NUM_THREADS=1 python3 ckpt/tests/reference/adamw.py ckpt/tests/golden/adamw.safetensors

A case has `elements` of each tensor and so many updates: `N/weights`, `N/exp_avg`, `N/exp_avg_sq`
before them, `N/grad.K`, and after each `N/weights.K`, `N/exp_avg.K`, `N/exp_avg_sq.K`.
"""

import json
import sys

import torch
from safetensors.torch import save_file

# Vectors of 8 and 16 with rests of every kind, also alone.
CASES = [
    dict(elements=203, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, divisor=1.0),
    dict(elements=203, lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, divisor=1.0),
    dict(elements=117, lr=0.02, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.01, divisor=1.7),
    dict(elements=76, lr=1e-2, beta1=0.4, beta2=0.9, eps=1e-3, weight_decay=0.3, divisor=65536.0),
    dict(elements=15, lr=1e-3, beta1=0.0, beta2=0.5, eps=1e-8, weight_decay=0.1, divisor=0.3),
    dict(elements=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, divisor=1.0),
]
UPDATES = 4


def main(out):
    torch.manual_seed(7)
    assert torch.get_num_threads() == 1
    tensors = {}
    for number, case in enumerate(CASES):
        n = case["elements"]
        weights = torch.randn(n) * torch.exp2(torch.randint(-12, 4, (n,)).float())
        exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
        state = {"weights": weights, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name, tensor in state.items():
            tensors[f"{number}/{name}"] = tensor.clone()
        for k in range(UPDATES):
            grad = torch.randn(n) * torch.exp2(torch.randint(-20, 6, (n,)).float())
            grad[k::7] = 0.0
            grad *= case["divisor"]
            tensors[f"{number}/grad.{k}"] = grad.clone()
            torch._fused_adamw_(
                [weights], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(k + 1))],
                lr=case["lr"], beta1=case["beta1"], beta2=case["beta2"],
                weight_decay=case["weight_decay"], eps=case["eps"], amsgrad=False, maximize=False,
                grad_scale=None if case["divisor"] == 1.0 else torch.tensor(case["divisor"]),
                found_inf=None,
            )
            for name, tensor in state.items():
                tensors[f"{number}/{name}.{k}"] = tensor.clone()
    cases = json.dumps([dict(case, updates=UPDATES) for case in CASES])
    save_file(tensors, out, {"torch": torch.__version__, "cases": cases})


if __name__ == "__main__":
    main(sys.argv[1])
