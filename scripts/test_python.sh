#!/usr/bin/env bash
# Tests of the Python package: builds its wheel, installs it into a clean environment in
# target/python, and runs python/tests there. Packages of others come from .venv.
#
#   scripts/test_python.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "test_python: skipped: expected Python 3.11 or newer, found $(python3 -V)" >&2
  exit 0
fi
scripts/wheel.sh --dev
target=${CARGO_TARGET_DIR:-target}
venv=$target/python
rm -rf "$venv"
.venv/bin/python -m venv --without-pip "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -m pip --python "$venv/bin/python" install -q --no-index --no-deps \
  "$target"/wheels/feedline-*.whl
# Nothing of .venv is seen before the package is: this import has to do without.
"$venv/bin/python" -I -c 'import feedline'
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/readers.pth"
cd python
"../$venv/bin/python" -m mypy.stubtest feedline._feedline --ignore-disjoint-bases
exec "../$venv/bin/python" -m pytest -q -p no:cacheprovider tests "$@"
