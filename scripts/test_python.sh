#!/usr/bin/env bash
# Tests the Python package: builds its wheel, installs it into two clean environments and runs
# python/tests there. The first has numpy and the packages of scripts/readers.txt, the second the
# frameworks that python/tests/sockets uses.
#
#   scripts/test_python.sh [PYTEST ARGUMENTS]
#   SOCKETS=newest   the frameworks of scripts/sockets.txt, on the newest Python here; the default
#   SOCKETS=oldest   those of scripts/sockets-oldest.txt, on Python 3.11, and no other tests
#   SOCKETS=unpinned the newest releases of today, and no other tests: prints what is newer than in
#                    scripts/sockets.txt
#   SOCKETS=none     no frameworks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "test_python: skipped: expected Python 3.11 or newer, found $(python3 -V)" >&2
  exit 0
fi
releases=${SOCKETS:-newest}
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

if [ "$releases" = newest ] || [ "$releases" = none ]; then
  environment python .venv/bin/python
  (
    cd python
    "$target/python/bin/python" -m mypy.stubtest feedline._feedline --ignore-disjoint-bases
    "$target/python/bin/python" -m pytest -q -p no:cacheprovider --ignore tests/sockets tests "$@"
  )
fi
[ "$releases" != none ] || exit 0
frameworks=$(scripts/setup.sh --sockets "$releases")
environment "sockets-$releases" "$frameworks"
[ "$releases" != unpinned ] || "$frameworks" scripts/newer_releases.py
code=0
(
  cd python
  "$target/sockets-$releases/bin/python" -m pytest -q -p no:cacheprovider --disable-warnings -rs \
    tests/sockets "$@"
) || code=$?
"$frameworks" scripts/newer_releases.py --not-run
exit $code
