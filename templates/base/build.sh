#!/bin/sh
# Builds the base template's root file system: build.sh OUT.tar
#
# Debian of the same release and from the same mirror as this machine, by mmdebstrap. Needs root and
# a package mirror. The same packages give the same bytes: all times come from SOURCE_DATE_EPOCH,
# which defaults to the date of the newest package index that this machine knows.
set -eu

# mmdebstrap mounts the machine's /dev, /proc and /sys into the tree. In namespaces of their own these mounts
# and all processes of the build are gone the moment this script is, however it ends, so that nobody who
# removes the remains of a build can reach the machine through them.
if [ -z "${IN_OWN_NAMESPACES:-}" ]; then
  IN_OWN_NAMESPACES=1 exec unshare --mount --propagation private --pid --mount-proc --fork \
    --kill-child=KILL /bin/sh "$0" "$@"
fi

out=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

. /etc/os-release
if [ "${ID:-}" != debian ] || [ -z "${VERSION_CODENAME:-}" ]; then
  echo "E: this machine is not a Debian release" >&2
  exit 1
fi
suite=$VERSION_CODENAME

# --- where this machine gets its packages from ----------------------------------------------------
. "$here/apt-sources.sh"
apt_indexes | awk -v suite="$suite" '
  $3 != "main" { next }
  $1 != suite && $1 != suite "-updates" && $1 != suite "-security" { next }
  !seen[$1 " " $2]++ { print }' > "$work/indexes"
if ! grep -q "^$suite " "$work/indexes"; then
  echo "E: apt on this machine knows no package index of $suite; run apt-get update" >&2
  exit 1
fi
while read -r release address component entry; do
  apt_stanza "$release" "$address" "$component" "$entry"
done < "$work/indexes" > "$work/debian.sources"

# --- one date for everything ------------------------------------------------------------------------
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  eval "$(apt-config shell lists Dir::State::lists/d)"
  SOURCE_DATE_EPOCH=$(
    cat "$lists"/*_dists_"$suite"*Release 2>/dev/null | sed -n 's/^Date: //p' |
      while read -r date; do date -ud "$date" +%s; done | sort -n | tail -1
  )
  [ -n "$SOURCE_DATE_EPOCH" ] || SOURCE_DATE_EPOCH=$(date -ud 'today 00:00' +%s)
fi
export SOURCE_DATE_EPOCH

# --- how this machine reaches the mirror --------------------------------------------------------------
# mmdebstrap does not read the machine's apt options, and keeps those that it is given in the tree:
# take the ones about reaching the mirror, and remove them again at the end.
set --
apt-config dump Acquire |
  grep -iE '^Acquire::(https?|ftp)::|^Acquire::(Check-Valid-Until|Check-Date|Retries|ForceIPv4|ForceIPv6) ' \
  > "$work/aptopts" || true
while IFS= read -r option; do
  set -- "$@" --aptopt="$option"
done < "$work/aptopts"

packages=$(grep -v '^#' "$here/packages" | tr -s '\n' ',')

# Folders are excluded while unpacking, which is faster than removing them. The last hook keeps a mirror's
# password, if its address holds one, out of every sandbox.
export RECIPE="$here"
mmdebstrap --mode=root --variant=apt --format=tar "$@" \
  --include="${packages#,}" \
  --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/info/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --customize-hook='mkdir "$1/.recipe" && cp -R "$RECIPE/." "$1/.recipe/"' \
  --customize-hook='chroot "$1" /bin/sh /.recipe/setup.sh' \
  --customize-hook='rm -rf "$1/.recipe" "$1/etc/apt/apt.conf.d/99mmdebstrap"' \
  --customize-hook='sed -i "s#://[^/@ ]*@#://#" "$1"/etc/apt/sources.list.d/*' \
  "$suite" "$out" "$work/debian.sources"
