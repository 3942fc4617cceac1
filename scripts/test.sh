#!/usr/bin/env bash
# All tests of the workspace: with nextest where it is installed, else with cargo's own runner.
# Ends with what was left out and why, because a skipped test must not look like a passed one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Ranks of one machine share its cores; a test that is about threads sets its own number.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Where the tests find the readers that others wrote.
export FEEDLINE_PYTHON=${FEEDLINE_PYTHON:-$PWD/.venv/bin/python}

skipped=$(mktemp)
trap 'rm -f "$skipped"' EXIT
# A test that cannot run here appends a line to this file and says so on stderr.
export FEEDLINE_SKIPPED=$skipped

if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --workspace --locked --no-fail-fast
else
  cargo test --workspace --locked --no-fail-fast
fi
cargo test --workspace --locked --doc -q

if [ -s "$skipped" ]; then
  echo "left out on this machine:"
  sort -u "$skipped" | sed 's/^/  /'
fi
