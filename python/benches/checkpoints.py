#!/usr/bin/env python3
"""Saves and loads of torch.distributed.checkpoint through Feedline and through its own storage.

    checkpoints.py save|load|stall FOLDER --bytes 4e9 --runs 5

Prints one JSON object: the seconds of each run, by measurement, and the bytes of the state.

The state is that of a GPT of width 1024 and its AdamW: weights in BF16, moments in FP32. `save`
ends when the checkpoint is durable, which is what `FileSystemWriter` does as well by default. `load`
drops the page cache before each run, as root, and loads into tensors that exist; the sides read
the same state. `stall` is how long `async_save` blocks the training loop: in the call, and before
the next step of the optimizer for the rest of the copy.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from feedline import ckpt
from feedline.dcp import StorageReader, StorageWriter
from feedline.safetensors import load_file

WIDTH = 1024


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=["save", "load", "stall"])
    parser.add_argument("folder")
    parser.add_argument("--bytes", type=float, default=4e9)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--program", help="feedline, for a save without Python")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    folder = pathlib.Path(args.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        print(json.dumps(globals()[args.side](args, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def state_of(bytes):
    """A state of about `bytes` bytes, by the names of parameters."""
    shapes = {
        "attention.qkv.weight": (3 * WIDTH, WIDTH),
        "attention.proj.weight": (WIDTH, WIDTH),
        "mlp.up.weight": (4 * WIDTH, WIDTH),
        "mlp.down.weight": (WIDTH, 4 * WIDTH),
        "attention.qkv.bias": (3 * WIDTH,),
        "mlp.up.bias": (4 * WIDTH,),
    } | {f"norm.{n}": (WIDTH,) for n in range(6)}
    layer_bytes = 10 * sum(torch.Size(shape).numel() for shape in shapes.values())
    state = {"model": {}, "optim": {"state": {}}}
    torch.manual_seed(0)
    for layer in range(max(1, round(bytes / layer_bytes))):
        for name, shape in shapes.items():
            tensor = torch.randn(shape)
            name = f"layers.{layer}.{name}"
            state["model"][name] = tensor.bfloat16()
            moments = {"exp_avg": tensor, "exp_avg_sq": tensor.square()}
            state["optim"]["state"][name] = moments | {"step": torch.tensor(1.0)}
    return state


def tensors_of(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        else:
            yield value


def bytes_of(state):
    return sum(tensor.nbytes for tensor in tensors_of(state))


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def save(args, folder):
    state = state_of(args.bytes)
    found = {"bytes": bytes_of(state), "ours": [], "theirs": [], "rust": []}

    def fresh():
        shutil.rmtree(folder)
        folder.mkdir()
        os.sync()

    for step in range(args.runs):
        fresh()
        writer = StorageWriter(folder, step)
        found["ours"].append(timed(lambda: dcp.save(state, storage_writer=writer)))
        if args.program:
            fresh()
            command = [args.program, "ckpt", "bench", folder, "--rows", "save", "--rounds", "1"]
            command += ["--bytes", f"{round(args.bytes / 1e6)}MB", "--json"]
            out = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            found["rust"].append(out)
        fresh()
        found["theirs"].append(timed(lambda: dcp.save(state, checkpoint_id=folder / "dcp")))
    return found


def load(args, folder):
    state = state_of(args.bytes)
    dcp.save(state, storage_writer=StorageWriter(folder / "ours", 1))
    dcp.save(state, checkpoint_id=folder / "dcp")
    found = {"bytes": bytes_of(state)} | {side: [] for side in ("ours", "theirs", "weights")}
    import safetensors
    import safetensors.torch as package

    found["safetensors"] = safetensors.__version__
    weights = sorted((folder / "ours").glob("step-*/model-*.safetensors"))
    found["weights_bytes"] = sum(file.stat().st_size for file in weights)
    found["weights_mmap"], found["weights_pread"] = [], []
    for tensor in tensors_of(state):
        tensor.zero_()

    def timed_cold(work):
        os.sync()
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
        return timed(work)

    def load_and_touch(backend):
        for file in weights:
            for tensor in package.load_file(file, backend=backend).values():
                tensor.view(-1)[::1024].view(torch.int16).sum()  # reads mapped pages

    for _ in range(args.runs):
        reader = StorageReader(folder / "ours")
        found["ours"].append(timed_cold(lambda: dcp.load(state, storage_reader=reader)))
        found["theirs"].append(timed_cold(lambda: dcp.load(state, checkpoint_id=folder / "dcp")))
        found["weights"].append(timed_cold(lambda: load_file(folder / "ours")))
        for backend in ("mmap", "pread"):
            found[f"weights_{backend}"].append(timed_cold(lambda: load_and_touch(backend)))
    assert ckpt.verify(folder / "ours", progress=False)["ok"]
    return found


def stall(args, folder):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    layers = max(1, round(args.bytes / 12 / (8 * WIDTH * WIDTH)))
    model = torch.nn.Sequential()
    for _ in range(layers):
        model.append(torch.nn.Linear(WIDTH, 4 * WIDTH))
        model.append(torch.nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, WIDTH)
    before_step = [0.0]

    def step():
        model(batch).square().mean().backward()
        start = time.perf_counter()
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        before_step[0] = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()

    step()

    def measure(**options):
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        start = time.perf_counter()
        future = dcp.async_save(state, **options)
        call = time.perf_counter() - start
        step()
        future.result()
        return call + before_step[0], state

    found = {"ours": [], "eager": [], "theirs": []}
    for run in range(args.runs):
        writer = StorageWriter(folder / "ours", run, optimizer=optimizer)
        seconds, state = measure(storage_writer=writer)
        found["ours"].append(seconds)
        found["eager"].append(measure(storage_writer=StorageWriter(folder / "eager", run))[0])
        found["theirs"].append(measure(checkpoint_id=folder / f"dcp-{run}")[0])
        found["bytes"] = sum(t.nbytes for t in tensors_of(state["model"])) + sum(
            t.nbytes for moments in state["optim"]["state"].values() for t in moments.values()
        )
        for each in folder.iterdir():
            shutil.rmtree(each)
    return found


if __name__ == "__main__":
    main()
