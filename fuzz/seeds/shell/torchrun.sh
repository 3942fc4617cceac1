#!/bin/bash
# One node, and the defaults of its variables.
GPUS=${GPUS:-8}
ARGS=(--num-layers 4 --hidden-size "$((16 * GPUS))")
ARGS+=(--lr ${LR:=1e-3})
torchrun --nproc_per_node "$GPUS" pretrain_gpt.py "${ARGS[@]}" \
  --save ~/ckpt/${1:-run}/{a,b}${NAME%%_*} 2>&1 | tee log.txt
