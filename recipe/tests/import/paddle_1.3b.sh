#!/usr/bin/env bash
# Eight GPUs of one node.
log_dir=log_1.3b
config=paddle_1.3b.yaml

python -m paddle.distributed.launch --log_dir $log_dir --devices "0,1,2,3,4,5,6,7" \
    tools/train.py \
    -c $config \
    -o Engine.max_steps=1000 \
    -o Engine.logging_freq=10
