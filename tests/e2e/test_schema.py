"""The server is held to its own OpenAPI document: requests that it allows and requests that it does not, made up from it."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Volume
from support import ROOT

DOCUMENT = ROOT / "openapi/sandglass.json"

OF_THE_SCHEMA = {"name": "of-the-schema", "value": "a value of a secret"}

# Of an answer: no failure of the server, a status, a type and a body that the document has.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def ask(server, folder: Path, parameters: dict[str, str], *options: str, document: Path = DOCUMENT):
    lines = [
        # What this version lacks is refused with 501, see openapi/endpoints.txt.
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "501"]',
        "[parameters]",
        *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in parameters.items()),
    ]
    config = folder / "schemathesis.toml"
    config.write_text("\n".join(lines))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", str(document)]
    command += ["--url", server.url, "-H", f"X-API-Key: {server.api_key}", "--checks", CHECKS]
    command += ["--phases", "coverage,fuzzing", "-n", "15", "--continue-on-failure", "--no-color", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)


def hold(*args: object) -> str:
    """What is said when nothing was found to be otherwise."""
    done = ask(*args)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(450)
def test_whatever_is_asked_the_answer_is_one_that_the_document_has(server, tmp_path):
    said = hold(server, tmp_path, {}, "--exclude-path-regex", "^/v1/templates/builds")
    assert "Tested: " in said


@pytest.mark.timeout(450)
def test_answers_about_what_is_there_are_as_the_document_says(server, tmp_path):
    with Sandbox.create(timeout=600, metadata={"a": "b"}) as sandbox:
        snapshot = sandbox.create_snapshot()
        volume = Volume.create("of-the-schema")
        try:
            [team] = httpx.get(f"{server.url}/teams", headers=server.headers).json()
            there = {"path.id": sandbox.sandbox_id, "path.port": "8000", "path.name": "base"}
            there |= {"query.teamID": team["teamID"]}
            elsewhere = (
                "^/v1/(snapshots|assignments|budgets|runs|connections)/|^/(teams|templates|volumes|volumecontent|secrets)/"
            )
            gets = ["--include-method", "GET", "--exclude-path-regex", elsewhere]
            said = hold(server, tmp_path, there, *gets)
            assert "404 Not Found" not in said, said
            there = {"path.id": team["teamID"], "query.metric": "sandbox_start_rate"}
            said = hold(server, tmp_path, there, "--include-path-regex", "^/teams/")
            assert "404 Not Found" not in said, said
            there = {"path.id": "base", "path.alias": "base"}
            names = ["GET /templates/{id}", "GET /templates/{id}/tags", "GET /templates/aliases/{alias}"]
            said = hold(server, tmp_path, there, *(word for name in names for word in ("--include-name", name)))
            assert "404 Not Found" not in said, said
            there = {"path.id": snapshot.snapshot_id}
            said = hold(server, tmp_path, there, "--include-name", "GET /v1/snapshots/{id}")
            assert "404 Not Found" not in said, said
            there = {"path.id": "of-the-schema"}
            written = {"target": "https://api.test", "methods": ["GET"], "paths": ["/"], "credential": "bearer", "value": "a long value"}
            for kept, made in [
                ("/v1/connections", httpx.put(f"{server.url}/v1/connections/of-the-schema", headers=server.headers, json=written)),
                ("/secrets", httpx.post(f"{server.url}/secrets", headers=server.headers, json=OF_THE_SCHEMA)),
            ]:
                assert made.status_code == 201, made.text
                said = hold(server, tmp_path, there, "--include-name", f"GET {kept}/{{id}}")
                assert "404 Not Found" not in said, said
                gone = httpx.delete(f"{server.url}{kept}/of-the-schema", headers=server.headers)
                assert gone.status_code == 204, gone.text
            there = {"path.id": volume.volume_id}
            said = hold(server, tmp_path, there, "--include-name", "GET /volumes/{id}")
            assert "404 Not Found" not in said, said
        finally:
            Sandbox.delete_snapshot(snapshot.snapshot_id)
            Volume.destroy(volume.volume_id)


def test_an_answer_that_the_document_has_not_is_noticed(server, tmp_path):
    """The control: whoever holds the server to another document finds it out."""
    document = json.loads(DOCUMENT.read_text())
    document["components"]["schemas"]["ServerInfo"]["properties"]["version"]["type"] = "integer"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document))
    done = ask(server, tmp_path, {}, "--include-path", "/v1/info", document=other)
    assert done.returncode == 1
    assert "not of type" in done.stdout
