#!/usr/bin/env bash
# All tests of the workspace, each in a process of its own, as .config/nextest.toml says. Ends with
# what was skipped and what needed a second try.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# nproc would take OMP_NUM_THREADS for the number of cores.
places=$((2 * $(env -u OMP_NUM_THREADS nproc)))
# Ranks of one machine share its cores; a test that is about threads sets its own number.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Where the tests find the readers that others wrote.
export FEEDLINE_PYTHON=${FEEDLINE_PYTHON:-$PWD/.venv/bin/python}

# Where scripts/setup.sh installs nextest if it is nowhere else.
export PATH=$PATH:${XDG_CACHE_HOME:-$HOME/.cache}/feedline/nextest/bin
report=${CARGO_TARGET_DIR:-target}/nextest/all/junit.xml

cargo nextest run --workspace --locked --no-run
scripts/build_cache.py save
code=0
rm -f "$report"
cargo nextest run --profile all --workspace --locked --test-threads "$places" || code=$?
cargo test --workspace --locked --doc -q || code=$?
scripts/test_report.py "$report"
scripts/test_python.sh || code=$?
exit $code
