# Sourced by what CI runs: stages one after the other, and at the end how long each took.

stages=()

# stage NAME PROGRAM...: runs it, and ends the script if it fails. Not for functions: errors within
# them would not end them here.
stage() {
  local name=$1 began=$SECONDS code=0
  shift
  printf '\n==> %s (%s s since the start)\n' "$name" "$SECONDS"
  "$@" || code=$?
  stages+=("$(printf '%6.1f min  %s' "$(minutes $((SECONDS - began)))" "$name")")
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
  printf '%6.1f min  in all\n' "$(minutes "$SECONDS")"
}
