NAME='gpt_345m.v2'
TEXT=$(cat <<EOF
--name ${NAME^^} --size ${#NAME} --part ${NAME:4:4}
EOF
)
mapfile -t LINES <<'END'
one
END
printf -v STEPS '%05d' $(( 0x10 << 2 ? 8#17 : 1 ))
python train.py $TEXT --end ${NAME##*.} --other ${NAME/_/-} --steps $STEPS $'a\tb' ${LINES[0]@U}
