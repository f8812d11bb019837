#!/bin/sh
# Checks a guest binary that still has its symbols: it must be fully static, small, and free of the C library's name services.
# Those would load plug-ins from the root file system it runs in, which is the enemy's, into the agent, which is root.
#
# usage: scripts/check-guest.sh BINARY
set -eu

MAX_BYTES=6000000

fail() {
    echo "check-guest: $1" >&2
    exit 1
}

[ $# -eq 1 ] || fail "usage: $0 BINARY"
binary=$1
[ -f "$binary" ] || fail "no such file: $binary"

# With a program interpreter it would run the guest's dynamic loader.
if readelf --program-headers "$binary" | grep -q 'INTERP'; then
    fail "$binary is not static: build it with RUSTFLAGS='-C target-feature=+crt-static'"
fi
if readelf --dynamic "$binary" | grep -q '(NEEDED)'; then
    fail "$binary needs shared libraries"
fi

symbols=$(nm "$binary" 2>/dev/null) || symbols=
[ -n "$symbols" ] || fail "$binary has no symbols left to check: strip it afterwards"
services=$(echo "$symbols" | awk '{ print $NF }' |
    grep -E '^(__)?(getaddrinfo|gethostby|getpw|getgr(ent|gid|nam|ouplist)|initgroups|__?nss_.*lookup|nss_.*lookup)' || true)
[ -z "$services" ] || fail "$binary contains name services of the C library:
$services
Use SocketAddr values only, never host names, and the guest's own parser of /etc/passwd."

stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip -o "$stripped" "$binary"
bytes=$(stat -c %s "$stripped")
[ "$bytes" -le "$MAX_BYTES" ] || fail "$binary has $bytes bytes without symbols, more than $MAX_BYTES"
echo "check-guest: $binary is static, has no name services and, without symbols, $bytes bytes"
