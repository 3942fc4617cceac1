#!/usr/bin/env bash
# Runs the numeric tests of `trainer` and `bridge` once for each lower instruction set to which the
# libraries of libtorch can be limited: older processors round and order sums in the same way.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PATH=$PATH:${XDG_CACHE_HOME:-$HOME/.cache}/feedline/nextest/bin

numeric='package(bridge) | package(trainer) & test(/^(eval|gpu|model|objectives|offloaded|parallel::(accumulate|deterministic|layouts|slices))::/)'
sets=(
  ATEN_CPU_CAPABILITY=default
  ATEN_CPU_CAPABILITY=avx2
  MKL_ENABLE_INSTRUCTIONS=SSE4_2
  MKL_ENABLE_INSTRUCTIONS=AVX2
  MKL_ENABLE_INSTRUCTIONS=AVX512
  ONEDNN_MAX_CPU_ISA=SSE41
  ONEDNN_MAX_CPU_ISA=AVX2
  ONEDNN_MAX_CPU_ISA=AVX512_CORE
)
for set in "${sets[@]}"; do
  echo "== $set"
  env "$set" cargo nextest run --workspace --locked --retries 0 -E "$numeric"
done
