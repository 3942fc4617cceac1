#!/usr/bin/env bash
# megatron-core 0.19 that saves again into the folder of an iteration of an earlier release returns,
# at the next load, the new tensors with the old common state (iteration, arguments, scheduler).
# Exits with 0 while it does, with 1 if not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"  # megatron-core 0.17 and later need Python 3.12
pip="$work/venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip torch==2.11.0 numpy==2.4.6 packaging==25.0 pyyaml==6.0.3 psutil==7.1.3
for release in 0.18.2 0.19.2; do
    $pip --no-deps --target "$work/$release" "megatron-core==$release"
done
cat > "$work/save.py" <<'PROGRAM'
import os, sys, warnings
warnings.filterwarnings("ignore")
import megatron.core, torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor


def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)), "iteration": value}


def main():
    folder, value = sys.argv[1], float(sys.argv[2])
    # Without a GPU: the save only synchronizes with it.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.makedirs(folder, exist_ok=True)
    dist_checkpointing.save(state(value), folder)
    found = dist_checkpointing.load(state(0.0), folder)
    print(f"megatron-core {megatron.core.__version__}, torch {torch.__version__}: saved {value}, "
          f"loaded tensor {found['w'][0].item()}, common state {found['iteration']}, "
          f"files {sorted(os.listdir(folder))}")
    sys.exit(0 if found["iteration"] == value else 9)


if __name__ == "__main__":
    main()
PROGRAM
save() { PYTHONPATH="$work/$1" timeout 200 "$work/venv/bin/python" "$work/save.py" "$work/iter_0000010" "$2" 2>"$work/log"; }
save 0.18.2 1 || { tail -5 "$work/log"; exit 1; }
status=0; save 0.19.2 2 || status=$?
if [ "$status" = 9 ]; then
    echo "megatron-core 0.19.2 loads the common.pt of 0.18.2, which its own save has left in the folder"
    exit 0
fi
echo "the behaviour has changed: exit status $status"; exit 1
