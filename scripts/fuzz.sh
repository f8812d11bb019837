#!/bin/bash
# Lets each fuzzer look for bytes that break a parser, for so many seconds each. What it found interesting is kept in
# fuzz/corpus, and where it broke something, the bytes are in fuzz/artifacts. Needs a nightly Rust.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-600}
version=0.13.2

export PATH="$PWD/target/tools/bin:$PATH"
if ! command -v cargo-fuzz >/dev/null; then
  cargo install -q --locked --root target/tools --target-dir target/tools/build cargo-fuzz@$version
  rm -rf target/tools/build
fi
for target in fuzz/fuzz_targets/*.rs; do
  target=$(basename "$target" .rs)
  mkdir -p "fuzz/corpus/$target"
  echo "== $target, $seconds s"
  # The parsers have no `unsafe`, so a sanitizer would find nothing more and look at less.
  cargo +nightly fuzz run -s none "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
    -max_total_time="$seconds" -max_len=20000 -rss_limit_mb=4096 -print_final_stats=1
done
