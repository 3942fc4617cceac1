#!/usr/bin/env bash
# Builds in target/dist what a release consists of, with SHA256SUMS:
#
#   feedline-VERSION-MACHINE-linux-glibc2.28.tar.gz  the programs `feedline` and `preprocess`, which
#                                                    need glibc 2.28 and nothing else
#   feedline-VERSION-cp311-abi3-manylinux*.whl       the Python package
#   feedline-VERSION.tar.gz                          its source, which `pip install` builds with Rust
#
# `trainer` is not included: it needs libtorch. The programs and the wheel are linked by zig, which
# setup.sh fetches from the Python package index.
#
#   scripts/dist.sh             all three
#   scripts/dist.sh --programs  the programs only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  "" | --programs) ;;
  *)
    echo "dist: unknown argument '$1': expected --programs or none" >&2
    exit 2
    ;;
esac
zig=$(scripts/setup.sh --zig)
target=${CARGO_TARGET_DIR:-target}
machine=$(uname -m)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
name=feedline-$version-$machine-linux-glibc2.28
dist=$target/dist
rm -rf "$dist"
mkdir -p "$dist/$name"

PATH=$zig/bin:$PATH cargo zigbuild --release --locked --target "$machine-unknown-linux-gnu.2.28" \
  -p tools -p preprocess
for program in feedline preprocess; do
  strip -o "$dist/$name/$program" "$target/$machine-unknown-linux-gnu/release/$program"
done
scripts/check_binaries.py --glibc 2.28 "$dist/$name"/*
cp LICENSE-* python/licenses/* "$dist/$name"
tar -C "$dist" --owner 0 --group 0 -czf "$dist/$name.tar.gz" "$name"
rm -r "${dist:?}/$name"

if [ $# = 0 ]; then
  scripts/wheel.sh
  cp "$target"/wheels/feedline-*.whl "$dist"
  .venv/bin/maturin sdist --manifest-path python/Cargo.toml --out "$dist"
fi
cd "$dist"
sha256sum feedline-* >SHA256SUMS
ls -l
echo "to install the programs:  tar xzf $name.tar.gz && install $name/{feedline,preprocess} ~/.local/bin"
