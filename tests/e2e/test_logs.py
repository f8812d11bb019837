"""What happened to a sandbox and in it, as its owner reads it."""

import datetime
import json

import httpx
from e2b import CommandExitException, Sandbox
from support import until


def logs(api, box, path="/v2/sandboxes/{}/logs", **params) -> list[dict]:
    answer = api.get(path.format(box.sandbox_id), params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["logs"]


def fail(box, command: str):
    try:
        box.commands.run(command)
    except CommandExitException:
        pass


def test_commands_and_states_are_told(fresh, api):
    fresh.commands.run("echo fine")
    fail(fresh, "echo broken; exit 3")
    told = until(
        lambda: [one for one in logs(api, fresh, direction="forward") if "broken" in one["message"]][1:], 10, "the end"
    )
    [end] = told
    assert (end["level"], end["fields"]["logger"]) == ("warn", "agent")
    assert end["message"] == "ended with code 3: echo broken; exit 3"
    assert end["fields"]["pid"].isdigit()
    messages = [one["message"] for one in logs(api, fresh, direction="forward")]
    assert messages[0].startswith("creating")
    assert messages.index("started: echo fine") < messages.index("ended with code 0: echo fine")
    # The latest first, if nobody says otherwise, and what is bad enough.
    assert logs(api, fresh)[0] == logs(api, fresh, direction="forward")[-1]
    assert logs(api, fresh, level="warn") == [end]
    assert len(logs(api, fresh, search="echo fine")) == 2


def test_the_older_form(fresh, api):
    fresh.commands.run("echo once")
    [entry] = [
        one for one in logs(api, fresh, "/sandboxes/{}/logs") if "ended with code 0: echo once" in one["line"]
    ]
    line = json.loads(entry["line"])
    assert (line["level"], line["logger"]) == ("info", "agent")
    whole = api.get(f"/sandboxes/{fresh.sandbox_id}/logs").json()
    assert len(whole["logs"]) == len(whole["logEntries"])
    # Whoever goes on after the last one misses none and sees none twice.
    at = max(one["timestamp"] for one in whole["logs"])
    later = httpx.get(
        f"{api.base_url}/sandboxes/{fresh.sandbox_id}/logs",
        headers=dict(api.headers),
        params={"start": millis(at) + 1},
    )
    assert later.json()["logs"] == []


def millis(text: str) -> int:
    return round(datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)


def test_a_copy_does_not_tell_what_its_source_was_told(fresh, api):
    fresh.commands.run("echo secret-of-the-source")
    [fork] = fresh.fork(timeout=60)
    try:
        fork.commands.run("echo own")
        messages = [one["message"] for one in logs(api, fork)]
        assert any("echo own" in message for message in messages)
        assert not any("secret-of-the-source" in message for message in messages)
    finally:
        fork.kill()


def test_a_pause_forgets_nothing(fresh, api):
    fresh.commands.run("echo before")
    fresh.pause()
    # What happened inside is told when it runs again.
    assert not any("echo before" in one["message"] for one in logs(api, fresh))
    assert any(one["message"].startswith("paused") for one in logs(api, fresh))
    Sandbox.connect(fresh.sandbox_id)
    assert any("ended with code 0: echo before" in one["message"] for one in logs(api, fresh))


def test_what_is_asked_wrongly(fresh, api):
    for params in ({"limit": "x"}, {"cursor": -1}, {"level": "fatal"}, {"direction": "up"}, {"search": "x" * 257}):
        assert api.get(f"/v2/sandboxes/{fresh.sandbox_id}/logs", params=params).status_code == 400
    for path in (f"/sandboxes/{'z' * 20}/logs", f"/v2/sandboxes/{'z' * 20}/logs"):
        assert api.get(path).status_code == 404


def test_an_agent_that_is_stopped_is_no_reason_to_wait(fresh, api):
    """Its owner hears the rest within the patience that the server has."""
    fresh.commands.run("true")
    assert any(one["fields"]["logger"] == "agent" for one in logs(api, fresh))
    fresh.commands.run("/usr/lib/sandglass/guest probe stop-agent 1", user="root", background=True, timeout=0)

    def alone() -> bool:
        told = logs(api, fresh)
        return bool(told) and all(one["fields"]["logger"] == "sandglass" for one in told)

    until(alone, 30, "an agent that tells nothing")

