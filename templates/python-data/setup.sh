#!/bin/bash
# Runs once, as root, while the template is built.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends python3-pandas python3-numpy >/dev/null
apt-get clean
rm -rf /var/lib/apt/lists/*

install -d /usr/local/lib/python-data
install -m 644 server.py /usr/local/lib/python-data/server.py
install -m 755 client.py /usr/local/bin/python-data
# Run in every copy before anybody reaches it.
install -d /etc/sandglass/on-restore.d
install -m 755 reseed.sh /etc/sandglass/on-restore.d/python-data
