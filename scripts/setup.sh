#!/usr/bin/env bash
# Installs what the build and the tests need. Idempotent: a second call only checks.
#
#   scripts/setup.sh           system packages, libtorch for the CPU, cached third-party crates
#   scripts/setup.sh --cuda    also the libraries to link a CUDA build, in .libtorch-cuda/
#   scripts/setup.sh --tests   cargo-nextest, and in .venv/ the third-party readers that tests compare with
#   scripts/setup.sh --wheel   in .venv/ the packages that build and test the Python package
#   scripts/setup.sh --zig     the linker zig, for wheels and programs that run with an older glibc; prints its folder
#   scripts/setup.sh --sockets newest|oldest|unpinned
#                              the frameworks of scripts/sockets.txt, of scripts/sockets-oldest.txt, or the newest
#                              releases of the packages of scripts/sockets.txt; prints the path of their Python
#   scripts/setup.sh --announce  what `make test` downloads and how long it takes, if anything is missing
#
# libtorch is taken from the wheel in the Python package index: the C++ library and its headers are a
# tenth of what `pip install torch` unpacks. It is stored with the compiled crates in
# ${XDG_CACHE_HOME:-~/.cache}/feedline, so that all clones share one path: with another path, all code
# that includes its headers would be recompiled. That folder may be deleted; this script restores it.
# Outside of the checkout, only pip's cache and, as root, apt packages are written besides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/feedline
LIBTORCH_VERSION=2.11.0
ZIG_VERSION=0.17.1
ZIGBUILD_VERSION=0.24.1

main() {
  if [ "${1:-}" = --announce ]; then
    announce
    return
  fi
  system_packages
  need_rust
  case "${1:-}" in
    "")
      libtorch "$CACHE/libtorch-$LIBTORCH_VERSION" cpu
      compiler_cache
      cargo_config
      scripts/build_cache.py restore
      ;;
    --cuda) libtorch .libtorch-cuda cuda ;;
    --tests)
      test_runner
      python_readers
      ;;
    --wheel) python_readers ;;
    --zig) linker "$CACHE/zig-$ZIG_VERSION-$ZIGBUILD_VERSION" ;;
    --sockets) frameworks "${2:-newest}" ;;
    *) die "unknown argument '$1': expected --cuda, --tests, --wheel, --zig, --sockets, --announce or none" ;;
  esac
}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# Programs that the C++ parts of the build call. They are searched by program, not by package, so that
# a machine that has them from another source is not changed.
system_packages() {
  local missing=()
  have g++ || missing+=(g++)
  have cmake || missing+=(cmake)
  have pkg-config || missing+=(pkg-config)
  have python3 || missing+=(python3)
  python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
  [ ${#missing[@]} -eq 0 ] && return
  have apt-get || die "please install: ${missing[*]} (this script can only use apt-get)"
  if [ "$(id -u)" -ne 0 ]; then
    die "please run once:  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >/dev/null || die "apt-get update failed; is the network up?"
  apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get could not install ${missing[*]}"
}

need_rust() {
  have cargo || die "expected cargo in PATH, found none (hint: install Rust 1.94 or newer with rustup)"
  local version
  version=$(rustc --version | cut -d' ' -f2)
  [ "$(printf '1.94\n%s\n' "$version" | sort -V | head -n 1)" = 1.94 ] ||
    die "expected Rust 1.94 or newer, found $version (hint: update it with rustup)"
}

have() { command -v "$1" >/dev/null 2>&1; }

# libtorch FOLDER cpu|cuda: unpacks the wheels into FOLDER with the layout of site-packages, because
# the libraries load each other by relative paths.
libtorch() {
  local folder=$1 kind=$2 stamp="$LIBTORCH_VERSION-$2-1"
  if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  if [ "$(uname -m)" != x86_64 ]; then
    say "libtorch for $(uname -m) is not set up by this script; the crates other than trainer build without it"
    return
  fi
  local wheels=(torch==$LIBTORCH_VERSION nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
  if [ "$kind" = cuda ]; then
    wheels+=(nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 nvidia-nccl-cu13==2.28.9)
  fi
  mkdir -p "$(dirname "$folder")"
  # Two clones may be set up at once; the second one finds it complete.
  exec 8>"$folder.lock"
  flock 8
  if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  local tmp="$folder.tmp"
  rm -rf "$tmp"
  mkdir -p "$tmp"
  say "fetching libtorch $LIBTORCH_VERSION ($kind; about 550 MB, kept in pip's cache)"
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 \
    --platform manylinux_2_18_x86_64 --platform manylinux2014_x86_64 -d "$tmp" "${wheels[@]}" ||
    die "libtorch could not be fetched from the Python package index; the crates other than trainer build without it"
  python3 scripts/unpack_libtorch.py "$kind" "$tmp" || die "a wheel does not have the expected files"
  rm "$tmp"/*.whl
  echo "$stamp" >"$tmp/stamp"
  rm -rf "$folder"
  mv "$tmp" "$folder"
  exec 8>&-
  say "libtorch is in $folder ($(du -sm "$folder" | cut -f1) MB)"
}

# libtorch's headers make each C++ file take 20 s; ccache reuses most results.
compiler_cache() {
  have ccache || [ "$(id -u)" -ne 0 ] || ! have apt-get ||
    { apt-get update -q && apt-get install -y -q --no-install-recommends ccache; } \
      >/dev/null 2>&1 || say "ccache could not be installed: every clone compiles its C++"
}

# Not committed, because the paths are absolute. Environment variables of the same name take precedence.
cargo_config() {
  local text compiler=
  ! have ccache || compiler="CXX = \"ccache ${CXX:-g++}\"
CCACHE_DIR = \"$CACHE/ccache\"
CCACHE_MAXSIZE = \"500M\"
CCACHE_NOHASHDIR = \"1\""
  text="# Written by scripts/setup.sh.
[env]
LIBTORCH = \"$CACHE/libtorch-$LIBTORCH_VERSION/torch\"
$compiler"
  mkdir -p .cargo
  [ "$(cat .cargo/config.toml 2>/dev/null)" = "$text" ] || echo "$text" >.cargo/config.toml
}

test_runner() {
  PATH=$PATH:$CACHE/nextest/bin
  ! have cargo-nextest || return 0
  say "installing cargo-nextest once, which takes some minutes"
  cargo install --quiet --locked --root "$CACHE/nextest" cargo-nextest@0.9.143 ||
    die "cargo-nextest could not be installed"
}

# A linker with the symbols of every release of glibc, which all clones share.
linker() {
  local folder=$1
  mkdir -p "$CACHE"
  exec 8>"$folder.lock"
  flock 8
  if [ ! -e "$folder/complete" ]; then
    say "fetching zig $ZIG_VERSION from the Python package index (90 MB)"
    rm -rf "$folder"
    python3 -m venv "$folder" || die "python3 -m venv failed (Debian: apt-get install python3-venv)"
    "$folder/bin/python" -m pip install -q --no-deps --only-binary=:all: \
      "ziglang==$ZIG_VERSION" "cargo-zigbuild==$ZIGBUILD_VERSION" >&2 ||
      die "zig could not be fetched from the Python package index"
    touch "$folder/complete"
  fi
  exec 8>&-
  echo "$folder"
}

# Third-party readers that the tests compare with: Megatron's own reader, numpy, safetensors,
# Hugging Face tokenizers.
python_readers() {
  local stamp
  stamp=$(sha256sum scripts/readers.txt | cut -c1-16)
  if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  rm -rf .venv
  say "creating .venv with $(grep -vc '^#' scripts/readers.txt) packages"
  python3 -m venv .venv || die "python3 -m venv failed (Debian: apt-get install python3-venv)"
  .venv/bin/python -m pip install -q --no-deps --only-binary=:all: -r scripts/readers.txt ||
    die "the packages of scripts/readers.txt could not be installed"
  echo "$stamp" >.venv/stamp
}

# The training frameworks that the Python package is tested with, in a folder that all clones share:
# PyTorch is 4 GB.
frameworks() {
  local which=$1 list=scripts/sockets.txt python folder dependencies=--no-deps
  mkdir -p "$CACHE"
  python=$(newest_python)
  case $which in
    newest) ;;
    oldest)
      list=scripts/sockets-oldest.txt
      python=$(python_of 3.11) || die "expected Python 3.11 for the oldest releases, found none"
      ;;
    unpinned)
      # Its name changes every day, so that each day installs what is newest then.
      list=$CACHE/unpinned-$(date +%F).txt
      sed '/^$/q' scripts/sockets.txt | grep -o '^[A-Za-z0-9_-]*' | sort -u | grep . >"$list"
      date +'# %F' >>"$list"
      dependencies=--prefer-binary
      ;;
    *) die "unknown releases '$which': expected newest, oldest or unpinned" ;;
  esac
  folder=$CACHE/sockets-$which-$({ "$python" -V && cat "$list"; } | sha256sum | cut -c1-16)
  exec 8>"$folder.lock"
  flock 8
  if [ ! -e "$folder/complete" ]; then
    say "fetching PyTorch and the frameworks of $list for $("$python" -V) (about 2.5 GB, kept in pip's cache)"
    # Those of earlier lists.
    find "$CACHE" -maxdepth 1 -type d -name "sockets-$which-*" -exec rm -rf {} +
    "$python" -m venv "$folder" || die "$python -m venv failed (Debian: apt-get install python3-venv)"
    "$folder/bin/python" -m pip install -q "$dependencies" --only-binary=:all: -r "$list" ||
      die "the packages of $list could not be installed"
    touch "$folder/complete"
  fi
  exec 8>&-
  echo "$folder/bin/python"
}

# The newest CPython that has wheels of all frameworks: of PATH, or installed by pyenv.
newest_python() {
  local version
  for version in 3.13 3.12 3.11; do
    python_of $version && return
  done
  die "expected Python 3.11, 3.12 or 3.13, found none (the frameworks have no wheels for others)"
}

# python_of VERSION: a Python of that version that can create environments.
python_of() {
  local candidate
  for candidate in "$(command -v "python$1")" "$(command -v python3)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python3; do
    if [ -x "$candidate" ] && "$candidate" -c \
      "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

# Before a long download, rather than in its middle.
announce() {
  local missing=()
  [ -e "$CACHE/libtorch-$LIBTORCH_VERSION/stamp" ] || missing+=("libtorch (0.55 GB)")
  [ -e .venv/stamp ] || missing+=("readers of other programs (0.1 GB)")
  compgen -G "$CACHE/sockets-newest-*/complete" >/dev/null ||
    missing+=("PyTorch and the frameworks of scripts/sockets.txt (2.5 GB; 6 GB on disk)")
  [ ${#missing[@]} -eq 0 ] && return
  local IFS=,
  say "make test downloads once what is missing in $CACHE:${missing[*]/#/ }"
  say "on two cores it takes about 40 minutes the first time, of which 18 build; about 25 later"
}

main "$@"
