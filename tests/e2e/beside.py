"""A scripted provider of models in the sandbox itself, for what is tried without a way out."""

from __future__ import annotations

import json
from pathlib import Path

from e2b import Sandbox

HERE = Path(__file__).parent

PROVIDER = """
import json, sys, threading
sys.path.insert(0, "/opt/provider")
from upstream import *

class Told(Upstream):
    def take(self, asked):
        with open("/tmp/asked", "a") as file:
            file.write(json.dumps([asked.method, asked.path, asked.key]) + "\\n")
        return super().take(asked)

upstream = Told()
{script}
print(upstream.url, flush=True)
threading.Event().wait()
"""


class Beside:
    """It says what the script, some lines of Python, makes of `upstream`; see upstream.py."""

    def __init__(self, box: Sandbox, script: str):
        self.box = box
        for name in ("dialects.py", "upstream.py"):
            box.files.write(f"/opt/provider/{name}", (HERE / name).read_text(), user="root")
        box.files.write("/tmp/provider.py", PROVIDER.format(script=script))
        box.files.write("/tmp/asked", "")
        self.process = box.commands.run("exec python3 /tmp/provider.py", background=True)
        self.url = next(out for out, _, _ in self.process if out).strip()

    def asked(self) -> list[list[str]]:
        """Method, path and key of each request."""
        return [json.loads(line) for line in self.box.files.read("/tmp/asked").splitlines()]

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_):
        self.process.kill()
