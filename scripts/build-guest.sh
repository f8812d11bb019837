#!/bin/sh
# Builds the static guest agent and places it, without symbols, at OUT: build-guest.sh OUT
set -eu
cd "$(dirname "$0")/.."
out=$1
target=x86_64-unknown-linux-gnu

# A folder of its own: other flags than the server's would otherwise rebuild everything every time.
RUSTFLAGS="-C target-feature=+crt-static" cargo build --locked -p sandglass-guest --profile guest \
  --target "$target" --target-dir target/guest
built=target/guest/$target/guest/sandglass-guest
scripts/check-guest.sh "$built"

strip -o "$out.$$" "$built"
# Keep an unchanged file's time, so that cargo does not build the server again.
if cmp -s "$out.$$" "$out"; then rm "$out.$$"; else mv "$out.$$" "$out"; fi
