train() {
  local model=$1; shift
  declare -A PEAK=([small]=6e-4 [large]=1e-4)
  if [[ $model =~ ^s[a-z]+$ ]]; then FLAGS="--lr ${PEAK[$model]}"; else FLAGS=''; fi
  deepspeed --num_gpus 2 pretrain.py $FLAGS "$@" --deepspeed_config ds.json
}
read -r A B <<< "2 4"
eval "train small --layers \$A" && train large --layers $B &
wait
