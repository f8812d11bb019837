#!/bin/sh
# Claude Code, which asks models and nobody else: no updates, reports or catalogues. `IS_SANDBOX` lets root skip its questions too.
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1 IS_SANDBOX=1
exec /opt/claude-code/node_modules/@anthropic-ai/claude-code-linux-x64/claude "$@"
