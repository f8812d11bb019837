"""The stories of tests/frameworks: frameworks for agents with their own sandboxes of E2B, against the same server.

Each runs in an environment of its own, because they pin different versions of the SDK. A test here for each story.
"""

from __future__ import annotations

import os
import re
import subprocess
import xml.etree.ElementTree as xml

import pytest
from support import ROOT

FOLDER = ROOT / "tests/frameworks"

# The file of each, and where it is installed.
FRAMEWORKS = {"test_deepagents.py": ".venv-deepagents", "test_openai_agents.py": ".venv-openai-agents"}

STORIES = [
    (file, story)
    for file in FRAMEWORKS
    for story in re.findall(r"^(?:async )?def (test_\w+)", (FOLDER / file).read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def outcomes(server, tmp_path_factory):
    """Runs a file when the first of its stories is asked for. Returns what went wrong, by story."""
    done: dict[str, dict[str, str]] = {}

    def of(file: str) -> dict[str, str]:
        if file not in done:
            done[file] = run(file, tmp_path_factory.mktemp(file.removesuffix(".py")))
        return done[file]

    return of


def run(file: str, folder) -> dict[str, str]:
    """What is told with the SDK must be told by it: nothing of this environment's gets into the other."""
    report = folder / "report.xml"
    settings = ["-c", ROOT / "tests/e2e/pytest.ini", "--rootdir", FOLDER, "--basetemp", folder / "tmp"]
    ended = subprocess.run(
        [ROOT / FRAMEWORKS[file] / "bin/python", "-m", "pytest", *settings, f"--junitxml={report}", FOLDER / file],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert report.exists(), f"pytest ended with {ended.returncode}: {ended.stdout}{ended.stderr}"
    found: dict[str, str] = {}
    for case in xml.parse(report).iter("testcase"):
        story = case.get("name", "").split("[")[0]
        # Something below a case tells that it failed, was skipped, or could not be cleared up after.
        wrong = "".join(f"{what.tag}: {what.text}" for what in case if what.tag not in ("system-out", "system-err"))
        found[story] = found.get(story, "") + wrong
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("file", "story"), STORIES)
def test_framework(outcomes, file, story):
    told = outcomes(file)
    assert story in told, f"{file} did not get there: {told}"
    assert not told[story], told[story]
