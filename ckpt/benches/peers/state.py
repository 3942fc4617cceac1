"""Saves or loads the state of a GPT and its Adam as another does it, and prints how long that took.

    state.py save|load torch|dcp|safetensors|deepspeed PATH --bytes N

The tensors are those of `ckpt::bench::SyntheticState`. A save counts until fsync has returned, a
load from dropped pages until every page of every tensor has been there.
"""

import argparse
import functools
import json
import os
import pathlib
import time

import torch

VOCABULARY = 50_304
GROUPS = {
    "model": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["save", "load"])
    parser.add_argument("kind", choices=["torch", "dcp", "safetensors", "deepspeed"])
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--bytes", type=int, required=True)
    args = parser.parse_args()
    act = globals()[f"{args.action}_{args.kind}"]
    if args.action == "save":
        state = fill(gpt(args.bytes))
        if args.kind == "deepspeed":
            deepspeed_memory()
        begun = time.perf_counter()
        act(state, args.path)
    else:
        drop_pages(args.path)
        state = fill(gpt(args.bytes)) if args.kind == "dcp" else None
        begun = time.perf_counter()
        state = act(state, args.path)
        touch(state)
    seconds = time.perf_counter() - begun
    size = sum(t.numel() * t.element_size() for t in state.values())
    print(json.dumps({"seconds": seconds, "bytes": size}))


def gpt(size):
    width = 2048 if size >> 20 >= 4096 else 1024 if size >> 20 >= 1024 else 256
    layer = 12 * width * width * 14
    layers = max(1, (max(0, size - VOCABULARY * width * 14) + layer // 2) // layer)
    shapes = {"embedding.weight": (VOCABULARY, width)}
    for i in range(layers):
        for name, shape in {
            "input_norm.weight": (width,),
            "input_norm.bias": (width,),
            "attention.qkv.weight": (3 * width, width),
            "attention.qkv.bias": (3 * width,),
            "attention.proj.weight": (width, width),
            "attention.proj.bias": (width,),
            "mlp_norm.weight": (width,),
            "mlp_norm.bias": (width,),
            "mlp.up.weight": (4 * width, width),
            "mlp.up.bias": (4 * width,),
            "mlp.down.weight": (width, 4 * width),
            "mlp.down.bias": (width,),
        }.items():
            shapes[f"layers.{i}.{name}"] = shape
    return {
        f"{group}.{name}": torch.zeros(shape, dtype=dtype)
        for group, dtype in GROUPS.items()
        for name, shape in shapes.items()
    }


def fill(state):
    """Writes every page, with what no device can compress."""
    noise = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8)
    for tensor in state.values():
        data = tensor.view(torch.uint8).view(-1)
        for start in range(0, len(data), len(noise)):
            part = data[start : start + len(noise)]
            part.copy_(noise[: len(part)])
    return state


def touch(state):
    for tensor in state.values():
        tensor.view(-1).view(torch.uint8)[::4096].max()


def sync(path):
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    for one in [*paths, path.parent]:
        handle = os.open(one, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def drop_pages(path):
    for one in path.rglob("*") if path.is_dir() else [path]:
        if one.is_file():
            handle = os.open(one, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def save_torch(state, path):
    torch.save(state, path)
    sync(path)


def load_torch(_, path):
    return torch.load(path, weights_only=True)


def save_dcp(state, path):
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    sync(path)


def load_dcp(state, path):
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def save_safetensors(state, path):
    from safetensors.torch import save_file

    save_file(state, str(path))
    sync(path)


def load_safetensors(_, path):
    from safetensors.torch import load_file

    return load_file(str(path))


@functools.cache
def deepspeed_memory():
    """What a run makes once, and for which DeepSpeed compiles C++ the first time of all."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    # Blocks of 8 MiB, 32 at once, from 64 MiB of pinned memory, as its own scripts have it.
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(8 << 20, 32, False, True, 1)
    return handle, handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))


def save_deepspeed(state, path):
    from deepspeed.io import FastFileWriter, FastFileWriterConfig

    handle, memory = deepspeed_memory()
    config = FastFileWriterConfig(
        dnvme_handle=handle,
        pinned_tensor=memory,
        double_buffer=True,
        num_parallel_writers=1,
        writer_rank=0,
    )
    writer = FastFileWriter(file_path=str(path), config=config)
    torch.save(state, writer)
    writer.close()
    sync(path)


if __name__ == "__main__":
    main()
