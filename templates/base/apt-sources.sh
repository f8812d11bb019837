# Where this machine gets its packages from, read from apt itself. To be sourced by /bin/sh scripts.

# One line per package index that apt knows: release, address, component, and the sources entry FILE:N.
apt_indexes() {
  apt-get indextargets --format '$(CODENAME) $(REPO_URI) $(COMPONENT) $(SOURCESENTRY)' \
    'Created-By: Packages' | sort -u
}

# The Signed-By of the sources entry FILE:N, as field lines of a deb822 stanza; nothing if it has none.
apt_signed_by() {
  case $1 in
    *.sources:*)
      # Stanza N, counted as apt does: comments do not count, blank lines divide.
      awk -v want="${1##*:}" '
        /^#/ { next }
        /^[ \t]*$/ { inside = 0; keep = 0; next }
        !inside { inside = 1; n++ }
        /^[^ \t]/ { keep = (n == want && tolower($0) ~ /^signed-by:/) }
        keep { print }' "${1%:*}"
      ;;
    *)
      # Line N: deb [option=value ...] address release component...
      sed -n "${1##*:}s/^[^[]*\\[[^]]*signed-by=\\([^] ]*\\).*/Signed-By: \\1/p" "${1%:*}"
      ;;
  esac
}

# A deb822 stanza: apt_stanza RELEASE ADDRESS COMPONENT FILE:N
apt_stanza() {
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n' "$2" "$1" "$3"
  apt_signed_by "$4"
  echo
}
