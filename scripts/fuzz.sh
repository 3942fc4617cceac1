#!/usr/bin/env bash
# Runs all fuzz targets, one after the other, for the given number of seconds each (default: 60).
# Needs the nightly toolchain. Findings are stored in fuzz/artifacts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SECONDS_EACH=${1:-60}

main() {
  cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
  cargo +nightly fuzz build
  local failed=()
  for target in $(cargo +nightly fuzz list); do
    fuzz "$target" || failed+=("$target")
  done
  [ ${#failed[@]} -eq 0 ] || { echo "fuzz: targets with findings: ${failed[*]}"; exit 1; }
}

fuzz() {
  local target=$1 options=(-max_total_time="$SECONDS_EACH" -timeout=20 -print_final_stats=1)
  [ ! -f "fuzz/dict/$target.dict" ] || options+=(-dict="fuzz/dict/$target.dict")
  mkdir -p "fuzz/corpus/$target"
  echo "== $target, $SECONDS_EACH s"
  cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- "${options[@]}" 2>&1 |
    grep -vE '#[0-9]+[[:space:]]+(NEW|REDUCE|RELOAD|pulse)|NEW_FUNC'
}

main
