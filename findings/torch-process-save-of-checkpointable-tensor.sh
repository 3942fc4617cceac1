#!/usr/bin/env bash
# torch 2.15: dcp.async_save in a process stores one rank's shard of a CheckpointableTensor as the
# complete tensor. No error is raised, and the other ranks' shards are lost. A thread saves it all.
# Exits with 0 if this is observed, with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.4.6
cat > "$folder/save.py" <<'PYTHON'
import logging, os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def shard(rank):
    """Rows 4 * rank to 4 * rank + 3 of a tensor of the size [8, 6]."""
    tensor = torch.arange(24.0).view(4, 6) + 24 * rank
    tensor.global_shape, tensor.global_offsets = (8, 6), ((4 * rank, 0),)
    tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((4, 6),)
    assert isinstance(tensor, dcp.CheckpointableTensor)
    return tensor

def run(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sizes = {}
    for kind in AsyncCheckpointerType:
        path = f"{folder}/{kind.name}"
        dcp.async_save({"w": shard(rank)}, checkpoint_id=path, async_checkpointer_type=kind).result()
        sizes[kind.name] = list(dcp.FileSystemReader(path).read_metadata().state_dict_metadata["w"].size)
    dist.barrier()
    if rank == 0:
        print(f"torch {torch.__version__}: a tensor of [8, 6] in two shards of [4, 6] is stored by a "
              f"thread as {sizes['THREAD']}, by a process as {sizes['PROCESS']}")
        with open(f"{folder}/sizes", "w") as file:
            file.write(str(sizes))
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PYTHON
timeout 300 "$folder/venv/bin/python" -W ignore "$folder/save.py" "$folder" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
[ "$(cat "$folder/sizes")" = "{'THREAD': [8, 6], 'PROCESS': [4, 6]}" ] || { echo "the behaviour has changed"; exit 1; }
echo "the process has lost the attributes that make the tensor a shard, and the rows of rank 1"
