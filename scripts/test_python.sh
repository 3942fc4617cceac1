#!/usr/bin/env bash
# Tests the Python package: builds its wheel, installs it into two clean environments and runs
# python/tests there. The first has numpy and the packages of scripts/readers.txt, the second the
# frameworks of scripts/sockets.txt, for python/tests/sockets.
#
#   scripts/test_python.sh [PYTEST ARGUMENTS]
#   SOCKETS=0 scripts/test_python.sh     without the frameworks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "test_python: skipped: expected Python 3.11 or newer, found $(python3 -V)" >&2
  exit 0
fi
scripts/wheel.sh --dev
target=$(realpath "${CARGO_TARGET_DIR:-target}")

# environment NAME PYTHON: creates one with the wheel and the packages of PYTHON's environment.
environment() {
  local venv=$target/$1 packages
  rm -rf "$venv"
  "$2" -m venv --without-pip "$venv"
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -m pip --python "$venv/bin/python" install -q --no-index --no-deps \
    "$target"/wheels/feedline-*.whl
  # The other packages are added after this import, which must work without them.
  "$venv/bin/python" -I -c 'import feedline'
  "$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/others.pth"
}

environment python .venv/bin/python
cd python
"$target/python/bin/python" -m mypy.stubtest feedline._feedline --ignore-disjoint-bases
"$target/python/bin/python" -m pytest -q -p no:cacheprovider --ignore tests/sockets tests "$@"
[ "${SOCKETS:-1}" = 1 ] || exit 0
cd ..
scripts/setup.sh --sockets
environment sockets "$(scripts/setup.sh --sockets-path)/bin/python"
cd python
exec "$target/sockets/bin/python" -m pytest -q -p no:cacheprovider --disable-warnings tests/sockets "$@"
