#!/bin/sh
# Installs what building, running and testing Sandglass needs on a Debian machine: Debian packages, and the
# Python SDK of the tests in .venv. Run it as often as you like: it only does what is missing.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*"; }
die() {
  printf '%s\n' "setup: $*" >&2
  exit 1
}

# --- this machine ---------------------------------------------------------------------------------
[ "$(id -u)" = 0 ] || die "run it as root: it installs packages, and sandboxes need root anyway (try: sudo make ...)"
[ -r /etc/os-release ] || die "this is no Debian machine: there is no /etc/os-release"
. /etc/os-release
case "${ID:-} ${VERSION_ID:-}" in
  "debian 12" | "debian 13") ;;
  *) die "this machine runs ${PRETTY_NAME:-an unknown system}; use Debian 12 or 13 (a virtual machine will do)" ;;
esac
[ "$(uname -m)" = x86_64 ] || die "this machine is $(uname -m); only x86_64 is supported"

# --- Debian packages --------------------------------------------------------------------------------
# The engine, the packet filter, disks and root file systems; then a linker and what the tests look with.
packages="runsc nftables e2fsprogs mmdebstrap
  gcc libc6-dev make binutils git ca-certificates python3 python3-venv procps iproute2 systemd"

is_installed() {
  [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Debian 12 itself has a runsc of 2022, which can't do what is asked of it here.
oldest_runsc=0.0~20240729
is_new_enough() { dpkg --compare-versions "$1" ge "$oldest_runsc"; }
# The newest good version that apt can install; nothing if there is none.
available_runsc() {
  apt-cache madison runsc 2>/dev/null | while read -r _ _ version _; do
    if is_new_enough "$version"; then echo "$version"; fi
  done | head -n 1
}

missing=
for package in $packages; do
  is_installed "$package" || missing="$missing $package"
done
if is_installed runsc && ! is_new_enough "$(dpkg-query --show --showformat='${Version}' runsc)"; then
  missing="$missing runsc"
fi

update_indexes() {
  say "updating the package indexes"
  apt-get update -q || say "apt-get update had errors; going on with what it got"
}

# Adds the backports of this release, from the mirror and with the key that this machine uses for the
# release itself.
enable_backports() {
  . templates/base/apt-sources.sh
  backports=$VERSION_CODENAME-backports
  apt_indexes | awk -v suite="$VERSION_CODENAME" '$1 == suite && $3 == "main" { print $2, $3, $4; exit }' |
    {
      read -r address component entry ||
        die "apt knows no index of $VERSION_CODENAME main; add your mirror to its configuration"
      file=/etc/apt/sources.list.d/sandglass-backports.sources
      say "enabling $backports of $address in $file"
      {
        echo "# Added by Sandglass for runsc. Packages here are only installed when asked for by name."
        apt_stanza "$backports" "$address" "$component" "$entry"
      } > "$file.new"
      mv "$file.new" "$file"
    }
}

if [ -n "$missing" ]; then
  say "missing packages:$missing"
  update_indexes
  case $missing in
    *runsc*)
      if [ -z "$(available_runsc)" ]; then
        enable_backports
        update_indexes
      fi
      version=$(available_runsc)
      [ -n "$version" ] ||
        die "no runsc $oldest_runsc or newer on this machine's mirror; it is in Debian 12's backports and in Debian 13"
      missing=$(echo "$missing" | sed "s/ runsc/ runsc=$version/")
      ;;
  esac
  say "installing packages"
  # shellcheck disable=SC2086 # a list of words
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing ||
    die "apt-get could not install:$missing"
fi

# --- Rust -----------------------------------------------------------------------------------------
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rust=$(rustc --version 2>/dev/null | cut -d' ' -f2) || rust=
[ -n "$rust" ] && command -v cargo >/dev/null || die "there is no Rust: install $wanted or newer with rustup"
[ "$(printf '%s\n%s\n' "$wanted" "$rust" | sort -V | head -n 1)" = "$wanted" ] ||
  die "Rust $rust is too old: $wanted or newer is needed (rustup update stable)"

# --- the Python SDK ---------------------------------------------------------------------------------
# Newest versions are wanted, so look again once a day; without a package index the old ones do.
stamp=.venv/.installed
if ! cmp -s tests/requirements.txt "$stamp" || [ -n "$(find "$stamp" -mtime +0)" ]; then
  if [ ! -x .venv/bin/pip ]; then
    say "making .venv"
    rm -rf .venv
    /usr/bin/python3 -m venv .venv
  fi
  say "installing the newest E2B SDK and pytest"
  if .venv/bin/pip install -q --disable-pip-version-check --upgrade -r tests/requirements.txt; then
    cp tests/requirements.txt "$stamp"
  elif cmp -s tests/requirements.txt "$stamp"; then
    say "the package index can't be reached; keeping what is installed"
  else
    die "pip could not install tests/requirements.txt"
  fi
fi

say "ready"
