#!/usr/bin/env bash
# Builds the wheel of the Python package `feedline`, with the programs `feedline` and `preprocess`
# in it, in target/wheels. One wheel is for CPython 3.11 and all later ones.
#
#   scripts/wheel.sh            optimised, for the glibc of this machine (Debian 12: 2.34 or newer)
#   scripts/wheel.sh --dev      from the debug build, for the tests
#   scripts/wheel.sh --portable for glibc 2.28 or newer, linked by zig from the package index
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile=release
folder=release
options=(--release)
case "${1:-}" in
  "") ;;
  --dev)
    profile=dev
    folder=debug
    options=(--profile dev --compatibility linux --auditwheel skip)
    ;;
  --portable) options+=(--zig --compatibility manylinux_2_28) ;;
  *)
    echo "wheel: unknown argument '$1': expected --dev, --portable or none" >&2
    exit 2
    ;;
esac

scripts/setup.sh --wheel
target=${CARGO_TARGET_DIR:-target}
# All three together, so that the crates that they share are compiled once.
cargo build --locked --profile "$profile" -p tools -p preprocess -p python
scripts=python/feedline.data/scripts
rm -rf python/feedline.data
mkdir -p "$scripts"
for program in feedline preprocess; do
  strip -o "$scripts/$program" "$target/$folder/$program"
done
rm -f "$target"/wheels/feedline-*.whl
# Third-party crates have other features here than in the tests, so they are cached separately.
[ "$profile" = release ] || scripts/build_cache.py save
.venv/bin/maturin build "${options[@]}" --locked --manifest-path python/Cargo.toml --out "$target/wheels"
rm -rf python/feedline.data
ls -l "$target"/wheels/feedline-*.whl
