"""Runs as a client sees them."""

from __future__ import annotations

import httpx
from support import Server

ENDED = ("completed", "failed", "cancelled")
PATIENCE = 60.0


class Runs:
    """The runs of one server."""

    def __init__(self, server: Server):
        self.server = server

    def ask(self, method: str, path: str, **more) -> httpx.Response:
        headers = self.server.headers | more.pop("headers", {})
        return httpx.request(method, f"{self.server.url}/v1/runs{path}", headers=headers, timeout=PATIENCE, **more)

    def create(self, command, key: str | None = None, **more) -> str:
        """A run of a program, whose standard input is the prompt."""
        body = {"prompt": "do it", "agent": {"command": command}, "timeout_seconds": 60} | more
        answer = self.ask("POST", "", json=body, headers={"Idempotency-Key": key} if key else {})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def get(self, id: str) -> dict:
        answer = self.ask("GET", f"/{id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, id: str, after: int = 0, wait: int = 0) -> tuple[list[dict], bool]:
        answer = self.ask("GET", f"/{id}/events", params={"after": after, "wait": wait})
        assert answer.status_code == 200, answer.text
        return answer.json()["events"], answer.json()["over"]

    def follow(self, id: str, until=lambda event: False) -> list[dict]:
        """Its events up to one, or to the last; with numbers that have no gap."""
        events, over = [], False
        while not over and not (events and until(events[-1])):
            more, over = self.events(id, len(events), wait=30)
            for event in more:
                events.append(event)
                if until(event):
                    break
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        return events

    def wait_for(self, id: str, type: str) -> list[dict]:
        events = self.follow(id, lambda event: event["type"] == type)
        assert events[-1]["type"] == type, [event["type"] for event in events]
        return events

    def end(self, id: str) -> tuple[dict, list[dict]]:
        """How it ended, and all that happened to it. Whatever became of it: its money is settled, and its sandbox gone."""
        events = self.follow(id)
        run = self.get(id)
        assert run["status"] in ENDED, run
        assert events[-1]["type"] == f"run.{run['status']}" and run["last_event"] == len(events), run
        assert run["cost"]["reserved_micros"] == 0 and run["cost"]["left_micros"] == 0, run
        assert run["cost"]["charged_micros"] <= run["max_cost_micros"]
        assert run["sandbox"]["state"] in ("destroyed", "none"), run
        if sandbox := run["sandbox"]["id"]:
            found = httpx.get(f"{self.server.url}/v1/sandboxes/{sandbox}", headers=self.server.headers, timeout=PATIENCE)
            assert found.json()["state"] == "ended"
        return run, events


def types(events: list[dict], *sources: str) -> list[str]:
    return [event["type"] for event in events if not sources or event["source"] in sources]


def output(events: list[dict]) -> str:
    """What the agent wrote to its standard output."""
    said = [event["data"] for event in events if event["type"] == "worker.output"]
    return "".join(data["text"] for data in said if data["stream"] == "stdout")
