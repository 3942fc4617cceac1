#!/usr/bin/env bash
# Runs all tests of the workspace, each in its own process, as configured in .config/nextest.toml. Then
# lists skipped tests and those that needed a retry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# nproc would return OMP_NUM_THREADS as the number of cores.
test_threads=$((2 * $(env -u OMP_NUM_THREADS nproc)))
# Ranks on one machine share its cores; tests of threads set their own number.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The Python that has the third-party readers.
export FEEDLINE_PYTHON=${FEEDLINE_PYTHON:-$PWD/.venv/bin/python}

# scripts/setup.sh installs nextest here if it is not in PATH.
export PATH=$PATH:${XDG_CACHE_HOME:-$HOME/.cache}/feedline/nextest/bin
report=${CARGO_TARGET_DIR:-target}/nextest/all/junit.xml

cargo nextest run --workspace --locked --no-run
scripts/build_cache.py save
code=0
rm -f "$report"
cargo nextest run --profile all --workspace --locked --test-threads "$test_threads" || code=$?
cargo test --workspace --locked --doc -q || code=$?
scripts/test_report.py "$report"
scripts/test_python.sh || code=$?
exit $code
