#! /bin/bash
# CPM-1's GPT-2: two stages of a pipeline, two ranks for each matrix.
GPUS_PER_NODE=4
NNODES=1
mp=2
pp=2
checkpoint_activations
gpt_options=" --model-parallel-size ${mp} --pipe-parallel-size ${pp} \
  --num-layers 2 --hidden-size 256 --num-attention-heads 16 --kv-hidden-size 16 \
  --ff-hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
  --max-position-embeddings 1024 --batch-size 4 --gas 16 --train-iters 320000 \
  --lr-decay-iters 320000 --save checkpoints/gpt2 --data-path /corpora/cpm/data \
  --data-impl mmap --vocab-file vocab.json --split 949,50,1 --distributed-backend nccl \
  --lr 1.5e-4 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 \
  --warmup 0.01 --checkpoint-activations --log-interval 1 --save-interval 500 \
  --eval-interval 100 --eval-iters 10 --fp16 --hidden-bias --tensorboard-dir tb \
  --attention-dropout 0.1 --hidden-dropout 0.1
"
eval deepspeed -i node1:4,5,6,7 --hostfile hosts pretrain_gpt2.py $@ ${gpt_options}
