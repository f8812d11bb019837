#!/bin/sh
# Turns a fresh Debian tree into the base template. Runs inside the tree, as root, without a network.
# The other recipe files are in the folder of this script.
set -eu
here=$(dirname "$0")

# --- the user -----------------------------------------------------------------------------------
useradd --uid 1000 --user-group --create-home --home-dir /home/user --shell /bin/bash \
  --groups sudo user
install -m 644 "$here/profile" /etc/profile
install -m 644 "$here/bashrc" /etc/bash.bashrc
for home in /home/user /root /etc/skel; do
  install -m 644 "$here/user.profile" "$home/.profile"
  install -m 644 "$here/user.bashrc" "$home/.bashrc"
  rm -f "$home/.bash_logout" "$home/.bash_profile"
done
chown -R user:user /home/user
# Lines of the kind that make a command slow for everyone.
rm -rf /etc/profile.d
mkdir -m 755 /etc/profile.d

# --- folders that every user may write ----------------------------------------------------------
mkdir -p /code
chmod -R a+rwX /usr/local /code

# --- python -------------------------------------------------------------------------------------
ln -sf python3 /usr/bin/python
# The computer is thrown away: there is no system to protect from `pip install`.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
# SOURCE_DATE_EPOCH makes Debian's hooks write byte code that reads its source again at every import.
# The modification times are those of the packages and stay as they are, so compare these instead.
python3 -m compileall -q -f --invalidation-mode timestamp /usr/lib/python3*

# --- what belongs to a machine and not to a template ----------------------------------------------
printf '127.0.0.1 localhost\n' > /etc/hosts
printf 'sandbox\n' > /etc/hostname
: > /etc/resolv.conf
: > /etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_*

# --- size ---------------------------------------------------------------------------------------
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/debconf/*-old /var/lib/dpkg/*-old
rm -rf /usr/share/man/* /usr/share/info/* /usr/share/lintian/* /usr/share/locale/*
find /usr/share/doc -mindepth 1 -not -name copyright -not -type d -delete
find /usr/share/doc -mindepth 1 -type d -empty -delete
find /var/log -type f -delete
# A rerun must give the same bytes.
rm -f /var/cache/ldconfig/aux-cache /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- \
  /etc/subuid- /etc/subgid-
# Passwords are off for everyone; the day on which that happened is no part of the template.
for account in root user; do chage --lastday 20000 "$account"; done
