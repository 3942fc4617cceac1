#!/usr/bin/env bash
# The main job, from text to text: clean, tokenize, inspect, plan, train, lose the process, resume,
# verify, generate. All output goes to demo-run/ in the checkout.
#
#   scripts/demo.sh            with release binaries, which it builds first
#   scripts/demo.sh --short    with the binaries that the tests built and a tenth of the steps; then
#                              compares the log of the resumed run with that of an uninterrupted one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The programs run from this folder, even if the environment sets another target folder of cargo.
export CARGO_TARGET_DIR=$PWD/target
OUT=demo-run
CORPUS=$OUT/english
DATA=${CORPUS}_text_document
RUN=$OUT/run
PROFILE=release
SHORTER=()
STAGES=8

main() {
  case ${1:-} in
    "") ;;
    --short)
      PROFILE=debug
      SHORTER=(--set run.budget.steps=30 --set optim.lr.warmup.steps=5 --set checkpoint.every.steps=5 --set eval.every=15
        --set eval.iters=2 --set log.every=3)
      [ -x target/debug/trainer ] || die "expected target/debug/trainer (hint: run make test first)"
      ;;
    *) die "unknown argument '$1': expected --short or none" ;;
  esac
  fresh_folder
  introduction
  [ $PROFILE = debug ] || build

  stage "Clean" \
    "The corpus has 379 pages of English books about Rust and 1,156 pages of Chinese poems. A small model learns" \
    "one language in a few minutes, so documents with less than 80 % Latin letters are dropped, and near-duplicates."
  run feedline clean --json-in demo/data/corpus.jsonl.zst --out "$CORPUS.jsonl" --min-script latin=0.8 --near-dedup

  stage "Tokenize" \
    "1.7 MB of text become token ids in Megatron's .bin/.idx format, with a checksum of every 512 bytes beside" \
    "them. The vocabulary has 2,048 tokens."
  run preprocess --json-in "$CORPUS.jsonl" --out "$CORPUS" --tokenizer hf --tokenizer-model demo/tokenizer.json --append-eod

  stage "Inspect and verify" \
    "inspect shows what a dataset has. check reads every byte and reports any that is corrupt."
  run feedline inspect "$DATA"
  run feedline check "$DATA"

  stage "Plan" \
    "Before a run starts, you know its parameters, memory, computation and checkpoint size."
  run trainer plan demo/gpt.toml "${SHORTER[@]}"

  stage "Train, and lose the process" \
    "The loader streams shuffled samples from disk. A checkpoint is saved every few steps, in the background." \
    "After two of them the process is killed by SIGKILL, so that it cannot clean up."
  train_and_kill

  stage "Resume" \
    "The same command again. It finds the newest complete checkpoint and ends with the same bits as" \
    "a run that was never interrupted: weights, optimizer state and log."
  run trainer train demo/gpt.toml "${SHORTER[@]}"
  [ $PROFILE = release ] || compare_with_uninterrupted

  stage "Verify the checkpoint" \
    "A checkpoint is a folder of safetensors files and a manifest. Every byte is under a checksum."
  run feedline inspect "$RUN/ckpt"
  run feedline check "$RUN/ckpt"

  stage "Generate" \
    "The model has about a million parameters and a few minutes of training. It has learned how sentences about" \
    "Rust sound; it has not learned what they mean."
  generate "The compiler"
  generate "In Rust, a reference"
  generate "When you write"

  closing
}

introduction() {
  cat <<TXT
Feedline demo: from text to a trained model and back to text, with a crash on the way.
On two cores it takes ten to fifteen minutes, most of it for the first build and the training. Output: $OUT/
TXT
}

build() {
  stage "Build" "Three programs in release mode. The first build takes a few minutes, most of it for C++ wrappers of libtorch."
  cargo build --quiet --release --locked -p preprocess -p tools -p trainer
  scripts/build_cache.py save
}

# stage TITLE SENTENCE...
stage() {
  local sentence number=
  if [ "$1" != Build ]; then
    stage_number=$((${stage_number:-0} + 1))
    number="$stage_number/$STAGES  "
  fi
  printf '\n\033[1m== %s%s\033[0m  [%d:%02d]\n' "$number" "$1" $((SECONDS / 60)) $((SECONDS % 60))
  for sentence in "${@:2}"; do note "$sentence"; done
  echo
}
note() { printf '   %s\n' "$*"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }

generate() {
  run trainer generate --ckpt "$RUN/ckpt" --tokens 64 --seed 1 --temperature 0.6 --top-k 40 --prompt "$1"
}

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

# The demo removes only a folder that a demo created.
fresh_folder() {
  if [ -e "$OUT" ] && [ ! -e "$OUT/.made-by-demo" ]; then
    die "cannot create $OUT/: a folder that the demo did not create exists (hint: move it away)"
  fi
  rm -rf "$OUT"
  mkdir -p "$OUT"
  touch "$OUT/.made-by-demo"
}

# Starts the training, waits for its second checkpoint and one second more, and sends SIGKILL, which a
# process cannot catch.
train_and_kill() {
  printf '\033[36m$ %s\033[0m\n' "trainer train demo/gpt.toml ${SHORTER[*]} &"
  "target/$PROFILE/trainer" train demo/gpt.toml "${SHORTER[@]}" &
  local pid=$! deadline=$((SECONDS + 600))
  while [ "$(checkpoints)" -lt 2 ]; do
    kill -0 "$pid" 2>/dev/null || { wait "$pid" || die "training exited with $? before its second checkpoint"; return; }
    [ $SECONDS -lt $deadline ] || { kill -9 "$pid"; die "no second checkpoint after 600 s"; }
    sleep 0.2
  done
  sleep 1
  printf '\033[36m$ kill -9 %s\033[0m\n' "$pid"
  kill -9 "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  note "killed. Complete checkpoints: $(cd "$RUN/ckpt" && echo step-*)"
}

# The same run without a kill has the same log, apart from the times of its steps.
compare_with_uninterrupted() {
  note "for comparison, the same run without interruption:"
  run trainer train demo/gpt.toml "${SHORTER[@]}" --set run.dir=$OUT/uninterrupted
  python3 - "$RUN/log.jsonl" "$OUT/uninterrupted/log.jsonl" <<'PY' || die "the logs differ"
import json, sys
def lines(path):
    with open(path) as log:
        return [{k: v for k, v in json.loads(line).items() if k != "perf"} for line in log]
resumed, uninterrupted = map(lines, sys.argv[1:])
if len(resumed) < 6 or resumed != uninterrupted:
    sys.exit(f"{len(resumed)} and {len(uninterrupted)} lines: "
             f"{[pair for pair in zip(resumed, uninterrupted) if pair[0] != pair[1]][:2]}")
PY
  note "the logs are equal"
}

checkpoints() { find "$RUN/ckpt" -maxdepth 1 -name 'step-*' 2>/dev/null | wc -l; }

closing() {
  printf '\n\033[1m== Done\033[0m  [%d:%02d]\n' $((SECONDS / 60)) $((SECONDS % 60))
  cat <<TXT
   tokens        $DATA.bin, .idx    readable by Megatron, GPT-NeoX, NeMo
   checkpoints   $RUN/ckpt/step-*                  safetensors and a manifest
   log           $RUN/log.jsonl, $RUN/tb     JSON lines, TensorBoard

   Next:
   export PATH=\$PWD/target/$PROFILE:\$PATH
   trainer report $RUN --out $OUT/report.html     loss, rate and times as one HTML page
   trainer generate --ckpt $RUN/ckpt --prompt "A closure is"
   preprocess --json-in YOUR.jsonl --out DIR/name --tokenizer gpt2 --append-eod
   README.md and docs/guides describe the other features.
TXT
}

main "$@"
