"""torch.distributed.checkpoint.async_save of a state on the CPU, one save a line on stdin.

Arguments: a folder, and the shapes of the tensors as JSON. Each answer is a line: seconds that the
call kept its caller, and seconds until the step was there.
"""

import json
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main():
    folder, shapes = sys.argv[1], json.loads(sys.argv[2])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("gloo", rank=0, world_size=1)
    state = {f"layers.{i}.weight": torch.rand(shape) for i, shape in enumerate(shapes)}
    place = os.path.join(folder, "bench-dcp-async")
    print(f"torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        if line.strip() != "save":
            break
        shutil.rmtree(place, ignore_errors=True)
        begun = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=place)
        block = time.perf_counter() - begun
        future.result()
        print(f"{block} {time.perf_counter() - begun}", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
