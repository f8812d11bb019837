#!/bin/bash
# Runs once, as root, while the template is built.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends nodejs >/dev/null
apt-get clean
rm -rf /var/lib/apt/lists/*

install -d /usr/local/lib/node-live
install -m 644 server.js randomness.js /usr/local/lib/node-live/
install -m 755 client.js /usr/local/bin/node-live
# Run in every copy before anybody reaches it.
install -d /etc/sandglass/on-restore.d
install -m 755 reseed.sh /etc/sandglass/on-restore.d/node-live
