#! /bin/bash
# CPM-2's encoder and decoder of 11 billion: 40 nodes of eight GPUs.
DIR=/home/cpm2
MP_SIZE=4
CKPT_PATH=""
NUM_WORKERS=40
NUM_GPUS_PER_WORKER=8
OPTS=""
OPTS+=" --model-config ${DIR}/cpm2_model.json"
OPTS+=" --model-parallel-size ${MP_SIZE}"
OPTS+=" --batch-size 26"
OPTS+=" --enc-seq-length 512"
OPTS+=" --dec-seq-length 256"
OPTS+=" --train-iters 200000"
OPTS+=" --save ${DIR}/results/"
OPTS+=" --log-file ${DIR}/results/log.txt"
# OPTS+=" --load ${CKPT_PATH}"
OPTS+=" --data-path ${DIR}/data/wudao"
OPTS+=" --data-impl mmap"
OPTS+=" --lazy-loader"
OPTS+=" --tokenizer-type GPT2BPETokenizer"
OPTS+=" --split 949,50,1"
OPTS+=" --distributed-backend nccl"
OPTS+=" --lr 0.001"
OPTS+=" --no-load-optim"
OPTS+=" --lr-decay-style noam"
OPTS+=" --weight-decay 1e-2"
OPTS+=" --clip-grad 1.0"
OPTS+=" --warmup 0.05"
OPTS+=" --tokenizer-path ${DIR}/bpe_cn_en"
OPTS+=" --save-interval 4000"
OPTS+=" --eval-interval 2000"
OPTS+=" --eval-iters 10"
OPTS+=" --log-interval 100"
OPTS+=" --checkpoint-activations"
OPTS+=" --deepspeed-activation-checkpointing"
OPTS+=" --fp16"
OPTS+=" --deepspeed"
OPTS+=" --deepspeed_config ${DIR}/cpm2_ds.json"
CMD="deepspeed --num_nodes ${NUM_WORKERS} --num_gpus ${NUM_GPUS_PER_WORKER} ${DIR}/src/pretrain_enc_dec.py $@ ${OPTS}"
echo ${CMD}
${CMD}
