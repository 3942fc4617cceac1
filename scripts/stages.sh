# Sourced by the scripts of CI: runs stages one after the other and prints how long each took.

stages=()

# stage NAME PROGRAM...: runs it, and exits if it fails. Not for functions: `set -e` has no effect in
# them here.
stage() {
  local name=$1 start=$SECONDS code=0
  shift
  printf '\n==> %s (%s s since the start)\n' "$name" "$SECONDS"
  "$@" || code=$?
  stages+=("$(printf '%6.1f min  %s' "$(minutes $((SECONDS - start)))" "$name")")
  if [ $code != 0 ]; then
    stages[-1]+=" FAILED (exit $code)"
    summary
    exit $code
  fi
}

minutes() { awk -v seconds="$1" 'BEGIN { printf "%.1f", seconds / 60 }'; }

summary() {
  printf '\n'
  printf '%s\n' "${stages[@]}"
  printf '%6.1f min  in total\n' "$(minutes "$SECONDS")"
}
