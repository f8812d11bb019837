#!/bin/bash
# Runs every test and ends with the line "N passed, N failed". `make test` sets up and builds first.
#
# A skipped test is a failure: root, runsc and the SDK are there after the set-up.
set -uo pipefail
cd "$(dirname "$0")/.."

nextest_version=0.9.143
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

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
step "Rust tests"
cargo nextest run --locked --release --workspace 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
summary=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | grep -E '^ *Summary ' | tail -n 1)
tally "$(number passed <<< "$summary")" \
  $(($(number failed <<< "$summary") + $(number 'timed out' <<< "$summary"))) \
  "$(number skipped <<< "$summary")" "$status" "the Rust tests"

step "Rust examples in the documentation"
# Those of the protocol are in generated code, and the generator marks them as not to be run.
cargo test --locked --release --workspace --exclude sandglass-proto --doc -q 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
sum() { grep -oE "[0-9]+ $1" "$log" | awk '{ n += $1 } END { print n + 0 }'; }
tally "$(sum passed)" "$(sum failed)" "$(sum ignored)" "$status" "the documentation"

# --- end to end ------------------------------------------------------------------------------------------
step "end-to-end tests with the E2B SDK"
.venv/bin/python -m pytest tests/e2e 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
summary=$(tail -n 1 "$log")
tally "$(number passed <<< "$summary")" \
  $(($(number failed <<< "$summary") + $(number 'errors?' <<< "$summary"))) \
  "$(number skipped <<< "$summary")" "$status" "the end-to-end tests"

printf '\n%s passed, %s failed\n' "$passed" "$failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
