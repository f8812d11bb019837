#!/bin/bash
# Runs every test and ends with the line "N passed, N failed". `make test` sets up and builds first.
#
# A skipped test is a failure: root, runsc and the SDK are there after the set-up. A test that fails is tried once more,
# and counts by its second try; the end names those that needed one, for each of them is a defect to be mended.
set -uo pipefail
cd "$(dirname "$0")/.."

# The program with all assertions, from the same build as the Rust tests.
export SANDGLASS_PROGRAM=$PWD/target/debug/sandglass

nextest_version=0.9.143
passed=0 failed=0
logs=$(mktemp -d)
trap 'rm -r "$logs"' EXIT

step() { printf '\n== %s (%s s so far)\n' "$1" "$SECONDS"; }

# tally PASSED FAILED SKIPPED STATUS WHAT: counts, and lets nothing that went wrong go uncounted.
tally() {
  passed=$((passed + $1)) failed=$((failed + $2 + $3))
  [ "$3" = 0 ] || echo "FAILED: $3 tests of $5 were skipped"
  if [ "$4" != 0 ] && [ $(($2 + $3)) = 0 ]; then
    echo "FAILED: $5 ended with code $4"
    failed=$((failed + 1))
  fi
}
# number WORD: the number before WORD in the last summary line on standard input; 0 if there is none.
number() { grep -oE "[0-9]+ $1" | tail -n 1 | cut -d' ' -f1 | grep . || echo 0; }

# --- Rust: a process for each test, because many of them change namespaces or wait for children ------------
if ! command -v cargo-nextest >/dev/null; then
  export PATH="$PWD/target/tools/bin:$PATH"
fi
if ! command -v cargo-nextest >/dev/null; then
  step "installing cargo-nextest $nextest_version (once, some minutes)"
  cargo install -q --locked --root target/tools --target-dir target/tools/build \
    cargo-nextest@$nextest_version || exit 1
  rm -rf target/tools/build
fi
# Beside the end-to-end tests, because all of them spend much of their time in waiting.
rust_tests() { RUST_BACKTRACE=0 cargo nextest run --locked --workspace --retries 1; }
step "Rust tests, in the background"
rust_tests > "$logs/rust" 2>&1 &
rust=$!

# --- end to end ------------------------------------------------------------------------------------------
# pytest_once WHAT VENV ARGUMENT...: leaves its output in $logs/pytest, its last line in $summary, its end in $status.
pytest_once() {
  step "$1"
  "$2/bin/python" -m pytest "${@:3}" 2>&1 | tee "$logs/pytest"
  status=${PIPESTATUS[0]}
  summary=$(tail -n 1 "$logs/pytest")
  grep -aE '^(FAILED|ERROR) |^E  ' "$logs/pytest" | cut -c -300 | head -n 60 >> "$logs/failed"
}
# More failures than this in one run are not tried again: that is no accident.
most_again=5
# pytest_run WHAT VENV ARGUMENT...
pytest_run() {
  pytest_once "$@"
  # The names are said with the folder or without it, depending on how many workers there were.
  mapfile -t again < <(sed -nE 's#^(FAILED|ERROR) (tests/e2e/)?#tests/e2e/#p' "$logs/pytest" | sed 's/ - .*//' | sort -u)
  if [ "$status" = 1 ] && [ ${#again[@]} -gt 0 ] && [ ${#again[@]} -le $most_again ]; then
    tally "$(number passed <<< "$summary")" 0 "$(number skipped <<< "$summary")" 0 "$1"
    printf '%s\n' "${again[@]}" >> "$logs/again"
    pytest_once "$1: what failed, once more" "$2" "${again[@]}"
  fi
  tally "$(number passed <<< "$summary")" \
    $(($(number failed <<< "$summary") + $(number 'errors?' <<< "$summary"))) \
    "$(number skipped <<< "$summary")" "$status" "$1"
}
# Three files at a time, each with a server of its own, in the order that conftest.py gives them: a third of their time
# is spent in waiting on two processors.
parallel=(-n 3 --dist loadfile --no-loadscope-reorder -m "not alone")
pytest_run "end-to-end tests with the newest E2B SDKs" .venv "${parallel[@]}" tests/e2e
pytest_run "user stories with the E2B SDK 2.45.1" .venv-2.45.1 "${parallel[@]}" \
  tests/e2e/test_{async,commands,files,lifecycle,ports,pty,users}.py

wait $rust
status=$?
step "Rust tests"
cat "$logs/rust"
summary=$(sed 's/\x1b\[[0-9;]*m//g' "$logs/rust" | grep -E '^ *Summary ' | tail -n 1)
tally "$(number passed <<< "$summary")" \
  $(($(number failed <<< "$summary") + $(number 'timed out' <<< "$summary"))) \
  "$(number skipped <<< "$summary")" "$status" "the Rust tests"

pytest_run "end-to-end tests that want the machine for themselves" .venv -m alone tests/e2e

step "the soak, a tenth of it"
"$SANDGLASS_PROGRAM" bench soak
status=$?
tally "$((status == 0))" "$((status != 0))" 0 "$status" "the soak"

# Said once more where it is seen, however much was said in between.
grep -aE '^ *FLAKY ' "$logs/rust" >> "$logs/again"
if [ "$failed" != 0 ] || [ -s "$logs/again" ]; then
  step "what failed, be it once"
  grep -h -a -A 4 -E "panicked at|^ *(TRY [12] )?(FAIL|TIMEOUT|TMT) " "$logs/rust" | head -n 60
  cat "$logs/failed" 2>/dev/null
fi
if [ -s "$logs/again" ]; then
  step "what was tried twice"
  cat "$logs/again"
fi
printf '\n%s passed, %s failed\n' "$passed" "$failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
