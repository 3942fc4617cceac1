#!/usr/bin/env bash
# The main job, from text to text: tokenize, inspect, plan, train with checkpoints, lose the
# machine, resume, check, generate. All output goes to demo-run/ in the checkout.
#
#   scripts/demo.sh            release binaries, built first
#   scripts/demo.sh --short    the binaries that the tests built, a tenth of the steps, and at the
#                              end the log of the resumed run against one that nothing stopped
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Where the programs are called from below, whatever the environment says.
export CARGO_TARGET_DIR=$PWD/target
OUT=demo-run
CORPUS=$OUT/corpus
DATA=${CORPUS}_text_document
RUN=$OUT/run
PROFILE=release
SHORTER=()

main() {
  case ${1:-} in
    "") build ;;
    --short)
      PROFILE=debug
      SHORTER=(--set run.budget.steps=30 --set checkpoint.every.steps=5 --set eval.every=15
        --set eval.iters=2 --set log.every=3)
      [ -x target/debug/trainer ] || die "expected target/debug/trainer (hint: run make test first)"
      ;;
    *) die "unknown argument '$1': expected --short or none" ;;
  esac
  fresh_folder

  title "tokens: $(du -k demo/data/corpus.jsonl.zst | cut -f1) KiB of compressed JSON lines to Megatron's .bin and .idx"
  run preprocess --json-in demo/data/corpus.jsonl.zst --out "$CORPUS" --tokenizer gpt2 --append-eod

  title "what is in them"
  run feedline inspect "$DATA"
  run feedline check "$DATA"

  title "what the training will take"
  run trainer plan demo/gpt.toml "${SHORTER[@]}"

  title "train, until the power fails"
  train_and_kill

  title "resume from the newest complete checkpoint"
  note "the log and the weights end as if nothing had happened: to the bit"
  run trainer train demo/gpt.toml "${SHORTER[@]}"
  [ $PROFILE = release ] || compare_with_unstopped

  title "the checkpoint"
  run feedline inspect "$RUN/ckpt"
  run feedline check "$RUN/ckpt"

  title "generate"
  run trainer generate --ckpt "$RUN/ckpt" --tokens 64 --seed 1 --temperature 0.7 --top-k 40 --prompt "In Rust, a reference"
  run trainer generate --ckpt "$RUN/ckpt" --tokens 64 --seed 1 --temperature 0.7 --top-k 40 --prompt "春風"

  closing
}

build() {
  title "build"
  note "the first build takes a few minutes, most of it libtorch's C++ wrappers"
  cargo build --release --locked -p preprocess -p tools -p trainer
  scripts/build_cache.py save
}

title() { printf '\n\033[1m== %s\033[0m  [%d s]\n' "$*" "$SECONDS"; }
note() { printf '   %s\n' "$*"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

# run PROGRAM ARG...: shows the command as a user would type it, then runs it.
run() {
  printf '\033[36m$ target/%s/%s\033[0m\n' "$PROFILE" "$(quoted "$@")"
  "target/$PROFILE/$1" "${@:2}"
}

quoted() {
  local word text=()
  for word in "$@"; do
    case $word in *[\ \(\)]*) text+=("\"$word\"") ;; *) text+=("$word") ;; esac
  done
  echo "${text[*]}"
}

# The demo removes only a folder that a demo made.
fresh_folder() {
  if [ -e "$OUT" ] && [ ! -e "$OUT/.made-by-demo" ]; then
    die "$OUT/ exists and is not the demo's: move it away"
  fi
  rm -rf "$OUT"
  mkdir -p "$OUT"
  touch "$OUT/.made-by-demo"
}

# Starts the training, waits for its second checkpoint, lets it go on for a moment, and kills it the
# way a power cut does: no signal that it could answer.
train_and_kill() {
  printf '\033[36m$ %s\033[0m\n' "trainer train demo/gpt.toml ${SHORTER[*]} &"
  "target/$PROFILE/trainer" train demo/gpt.toml "${SHORTER[@]}" &
  local pid=$! deadline=$((SECONDS + 600))
  while [ "$(checkpoints)" -lt 2 ]; do
    kill -0 "$pid" 2>/dev/null || { wait "$pid" || die "the training ended with $? before its second checkpoint"; return; }
    [ $SECONDS -lt $deadline ] || { kill -9 "$pid"; die "no second checkpoint after 600 s"; }
    sleep 0.2
  done
  sleep 1
  printf '\033[36m$ kill -9 %s\033[0m\n' "$pid"
  kill -9 "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  note "killed; complete checkpoints: $(cd "$RUN/ckpt" && echo step-*)"
}

# The same run without a kill has the same log, apart from how fast each step was.
compare_with_unstopped() {
  title "against a run that nothing stopped"
  run trainer train demo/gpt.toml "${SHORTER[@]}" --set run.dir=$OUT/unstopped
  python3 - "$RUN/log.jsonl" "$OUT/unstopped/log.jsonl" <<'PY' || die "the logs differ"
import json, sys
def lines(path):
    with open(path) as log:
        return [{k: v for k, v in json.loads(line).items() if k != "perf"} for line in log]
resumed, unstopped = map(lines, sys.argv[1:])
if len(resumed) < 6 or resumed != unstopped:
    sys.exit(f"{len(resumed)} and {len(unstopped)} lines: "
             f"{[pair for pair in zip(resumed, unstopped) if pair[0] != pair[1]][:2]}")
PY
  note "the logs are equal"
}

checkpoints() { find "$RUN/ckpt" -maxdepth 1 -name 'step-*' 2>/dev/null | wc -l; }

closing() {
  title "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
  cat <<TXT
   tokens        $DATA.bin, .idx        readable by Megatron, GPT-NeoX, NeMo
   checkpoints   $RUN/ckpt/step-*       safetensors and a manifest
   log           $RUN/log.jsonl         and $RUN/tb for TensorBoard
   next          trainer generate --ckpt $RUN/ckpt --prompt "fn main() {"
                 trainer train demo/gpt.toml --set run.dir=$OUT/mine --set model.layers=6 --set run.budget.steps=500
                 preprocess --json-in YOUR.jsonl --out DIR/name --tokenizer gpt2 --append-eod
   the programs are in target/release; README.md says what else they do
TXT
}

main "$@"
