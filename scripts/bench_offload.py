#!/usr/bin/env python3
"""bench_offload.py [--parameters N] [--rounds N] [--threads N] [--feedline PATH]: an AdamW update in
host memory, compared with libtorch's fused one and, where it can be built, DeepSpeed's CPU Adam.

Each round measures all of them, one after the other, and every second round in reverse order, on the
same number of parameters in tensors of 16 Mi, with gradients in f32. It prints the medians, and the
median, minimum and maximum of the ratios of the rounds. Needs torch; DeepSpeed also needs `pip install
deepspeed` and a C++ compiler.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

MATRIX = 1 << 24


def ours(args):
    with tempfile.TemporaryDirectory() as folder:
        command = [args.feedline, "offload", "bench", folder, "--json", "--parameters", "0"]
        command += ["--host-parameters", str(args.parameters), "--rounds", "3"]
        command += ["--input-bytes", "0B"]
        output = subprocess.run(
            command + ["--threads", str(args.threads)], check=True, capture_output=True
        )
    report = json.loads(output.stdout)
    return 28 * args.parameters / report["host_f32_step_bytes_per_s"], report["triad_bytes_per_s"]


def tensors(parameters):
    import torch

    sizes = [min(MATRIX, parameters - at) for at in range(0, parameters, MATRIX)]
    return [torch.full((size,), 0.01, dtype=torch.float32) for size in sizes]


def torch_step(args):
    import torch

    torch.set_num_threads(args.threads)
    weights = tensors(args.parameters)
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    adamw = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.1, fused=True)
    return lambda: adamw.step()


def deepspeed_step(args):
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(args.threads)
    weights = [torch.nn.Parameter(weight) for weight in tensors(args.parameters)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    adam = DeepSpeedCPUAdam(weights, lr=1e-4, weight_decay=0.1, adamw_mode=True)
    return lambda: adam.step()


def median_seconds(step):
    times = []
    for _ in range(4):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--feedline", default="target/release/feedline")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    peers = {"libtorch, fused": torch_step, "DeepSpeed CPU Adam": deepspeed_step}
    own, triads, others = [], [], {name: [] for name in peers}
    for number in range(args.rounds):
        turns = ["ours", *peers]
        for name in turns if number % 2 == 0 else reversed(turns):
            if name == "ours":
                seconds, triad = ours(args)
                own.append(seconds)
                triads.append(triad)
                continue
            try:
                others[name].append(median_seconds(peers[name](args)))
            except Exception as error:  # noqa: BLE001
                print(f"{name}: skipped: {str(error).splitlines()[0]}")
                del peers[name]
    rate = 28 * args.parameters / 1e9
    print(f"{args.parameters} parameters, {args.threads} threads, medians of {args.rounds}")
    print(f"ours: {statistics.median(own):.4f} s, {rate / statistics.median(own):.2f} GB/s")
    print(f"stream triad: {statistics.median(triads) / 1e9:.2f} GB/s")
    for name, times in others.items():
        if times:
            ratios = [theirs / mine for theirs, mine in zip(times, own)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{name}: {statistics.median(times):.4f} s, ours is {ratio} times as fast")


if __name__ == "__main__":
    main()
