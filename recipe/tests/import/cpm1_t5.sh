#! /bin/bash
# A launch of CPM-1's T5 as its repository has it: four GPUs, two of them for each matrix.
GPUS_PER_NODE=4
NNODES=1
MASTER_PORT=8888
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
ROOT=/corpora/t5
DATA="${ROOT}/baike_document"
SAVE=checkpoints/t5
ds_json="${ROOT}/cpm1_ds_t5.json"
mp=2
pp=1
LAYERS=2
BATCH=4
GAS=16

recompute=false
t5_options=" \
        --model-parallel-size ${mp} \
        --pipe-parallel-size ${pp} \
        --num-layers $LAYERS --hidden-size 128 --kv-hidden-size 16 --ff-hidden-size 256 \
        --num-attention-heads 8 --enc-seq-length 1024\
        --dec-seq-length 384 --max-position-embeddings 1024 \
        --batch-size $BATCH --gas $GAS \
        --train-iters 320000 --lr-decay-iters 320000 \
        --save $SAVE --data-path $DATA --vocab-file ${ROOT}/bpe --data-impl mmap \
        --split 949,50,1 --distributed-backend nccl \
        --lr 1.5e-4 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 \
        --warmup 0.01 --log-interval 1 --save-interval 500 --eval-interval 100 --eval-iters 10 \
        --fp16 --tensorboard-dir tb/${LAYERS}l
"
deepspeed_options=" --deepspeed --deepspeed_config ${ds_json} "
if [ "${reduce_scatter}" = "true" ]; then
deepspeed_options="${deepspeed_options} --zero-reduce-scatter"
fi
if ["${recompute}" = "true"]; then
        chkp=" --checkpoint-activations --checkpoint-num-layers 1"
        if [ "${PA}" = "true" ]; then
        chkp="${chkp} --partition-activations"
        fi
else
        chkp = " "
fi
full="${t5_options} ${deepspeed_options} ${chkp}"
run_cmd="deepspeed --master_port ${MASTER_PORT} -i node1:4,5,6,7 --hostfile hosts pretrain_t5.py $@ ${full}"
echo ${run_cmd}
eval ${run_cmd}
set +x
