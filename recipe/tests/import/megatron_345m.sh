#! /bin/bash
# The GPT-2 of 345 million of Megatron's first years: eight GPUs, two of them for each matrix.
GPUS_PER_NODE=8
NNODES=1
DATA=/corpora/my-gpt2_text_document
SAVE=checkpoints/gpt2_345m_mp2
LAUNCH="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank 0 --master_port 6000"
python -m torch.distributed.launch $LAUNCH pretrain_gpt2.py \
  --model-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --batch-size 8 --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 \
  --lr-decay-iters 320000 --save $SAVE --load $SAVE --data-path $DATA \
  --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 \
  --distributed-backend nccl --DDP-impl torch --lr 0.00015 --lr-decay-style cosine \
  --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --warmup .01 --checkpoint-activations \
  --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
set +x
