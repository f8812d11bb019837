"""The guest API by plain HTTP: what the SDK would not send."""

from __future__ import annotations

from urllib.parse import quote

import httpx


def routing(sandbox, port: int = 49983) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}


class Guest:
    """One sandbox's guest API, with its token."""

    def __init__(self, sandbox):
        headers = routing(sandbox) | {"X-Access-Token": sandbox._envd_access_token}
        # Longer than any answer takes on a busy machine: whatever hangs fails here.
        self.http = httpx.Client(base_url=sandbox.envd_api_url, headers=headers, timeout=60)

    def read(self, path: str | bytes, **more) -> httpx.Response:
        return self.http.get(f"/files?path={quote(path)}", **more)

    def write(self, path: str | bytes, data: bytes = b"x", user: str = "user") -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return self.http.post(f"/files?path={quote(path)}&username={user}", content=data, headers=headers)

    def files(self, method: str, user: str = "user", **message) -> httpx.Response:
        """A call of the filesystem service."""
        return self.http.post(f"/filesystem.Filesystem/{method}", json=message, auth=(user, ""))


def refused(response: httpx.Response, *statuses: int) -> str:
    """The message, if this is an error of the guest API: plain endpoints write the status, calls a word."""
    assert response.status_code in statuses, (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["code"] == response.status_code or isinstance(body["code"], str), body
    assert body["message"], body
    return body["message"]
