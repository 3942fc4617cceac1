#!/usr/bin/env bash
# All tests of the workspace, with nextest where it is installed, else with cargo's own runner, which
# has no limit for a test that hangs. Ends with what was skipped and what needed a second try.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Ranks of one machine share its cores; a test that is about threads sets its own number.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Where the tests find the readers that others wrote.
export FEEDLINE_PYTHON=${FEEDLINE_PYTHON:-$PWD/.venv/bin/python}

code=0
if cargo nextest --version >/dev/null 2>&1; then
  report=${CARGO_TARGET_DIR:-target}/nextest/default/junit.xml
  rm -f "$report"
  cargo nextest run --workspace --locked || code=$?
else
  report=
  cargo test --workspace --locked --no-fail-fast || code=$?
fi
cargo test --workspace --locked --doc -q || code=$?

if [ -n "$report" ] && [ -e "$report" ]; then
  scripts/test_report.py "$report"
else
  echo "tests that print SKIPPED did not run; \`make check-all\` runs those that need services"
fi
exit $code
