#!/usr/bin/env bash
# Builds the wheel of the Python package `feedline` in target/wheels. Its native module also is the
# programs `feedline` and `preprocess`. One wheel is for CPython 3.11 and all later ones.
#
#   scripts/wheel.sh            optimised, for glibc 2.28 or newer, linked by zig from the package
#                               index; if that cannot be fetched, as --native
#   scripts/wheel.sh --native   optimised, for the glibc of this machine or newer
#   scripts/wheel.sh --dev      from the debug build, for the tests
#   scripts/wheel.sh --check    tests the wheel in target/wheels with each Python that is found
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${CARGO_TARGET_DIR:-target}
portable=(--release --zig --compatibility manylinux_2_28)
case "${1:-}" in
  "")
    if zig=$(scripts/setup.sh --zig); then
      options=("${portable[@]}")
      # Otherwise maturin takes a zig that is in PATH, of another version.
      CARGO_ZIGBUILD_ZIG_PATH=$(echo "$zig"/lib/python3.*/site-packages/ziglang/zig)
      export CARGO_ZIGBUILD_ZIG_PATH
    else
      echo "wheel: expected zig, found none; the wheel needs the glibc of this machine" >&2
      options=(--release)
    fi
    ;;
  --native) options=(--release) ;;
  --dev) options=(--profile dev --features as-in-tests --compatibility linux --auditwheel skip) ;;
  --check) exec scripts/check_wheel.py "$target"/wheels/feedline-*.whl ;;
  *)
    echo "wheel: unknown argument '$1': expected --native, --dev, --check or none" >&2
    exit 2
    ;;
esac

scripts/setup.sh --wheel
rm -f "$target"/wheels/feedline-*.whl
.venv/bin/maturin build "${options[@]}" --locked --manifest-path python/Cargo.toml --out "$target/wheels"
# pyo3 is compiled for the wheel alone.
[ "${1:-}" != --dev ] || scripts/build_cache.py save
ls -l "$target"/wheels/feedline-*.whl
scripts/check_binaries.py "$target"/wheels/feedline-*.whl
