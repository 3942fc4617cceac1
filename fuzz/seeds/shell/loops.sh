for size in 64 {1..3} "$@"; do
  [ $size -gt 2 ] || continue
  SIZES[$size]=$size
done
for ((i = 0; i < 3; i++)); do let "SUM += i ** 2"; done
while (( N++ < 4 )); do case $N in [1-2]) A=$N ;; *) break ;; esac; done
until [[ $A == 2* && -n $N ]]; do A=2; done
python -m torch.distributed.run train.py --batch-size $SUM --list ${SIZES[*]} ${!SIZES[@]}
