"""The life of a sandbox through the SDK and through plain HTTP."""

import datetime
import re
import threading
import uuid

import httpx
import pytest
from conftest import pages
from e2b import (
    AuthenticationException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxQuery,
    TimeoutException,
)
from e2b.exceptions import SandboxNotFoundException
from support import OLD_SDK, until


def now():
    return datetime.datetime.now(datetime.timezone.utc)


def seconds_left(sandbox) -> float:
    return (sandbox.get_info().end_at - now()).total_seconds()


def body_of(response: httpx.Response, status: int) -> dict:
    """The error body that every client relies on."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body["code"] == status
    assert isinstance(body["message"], str) and body["message"]
    return body


def test_created_sandbox_answers_at_once(server):
    sandbox = Sandbox.create(timeout=60)
    try:
        assert re.fullmatch(r"[a-z0-9]{20}", sandbox.sandbox_id)
        assert sandbox.is_running()
        info = sandbox.get_info()
        assert info.sandbox_id == sandbox.sandbox_id
        assert info.name == "base" or info.template_id == "base"
        assert info.state.value == "running"
        assert info.envd_version == "0.6.13"
        assert info.cpu_count >= 1 and info.memory_mb >= 128
        assert 50 < (info.end_at - info.started_at).total_seconds() < 70
    finally:
        assert sandbox.kill()


def test_default_timeout_is_five_minutes(server):
    with Sandbox.create() as sandbox:
        info = sandbox.get_info()
        assert 295 < (info.end_at - info.started_at).total_seconds() < 305
    assert not sandbox.is_running()


def test_kill_is_final_and_says_whether_there_was_something(server):
    sandbox = Sandbox.create(timeout=60)
    assert sandbox.kill() is True
    assert sandbox.is_running() is False
    # While it is being ended, a second kill joins the first.
    until(lambda: sandbox.kill() is False, what="no sandbox to kill")
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id)
    with pytest.raises(Exception, match="(?i)not found"):
        sandbox.commands.run("true")
    assert Sandbox.kill("0" * 20) is False


def test_a_command_that_runs_when_the_sandbox_is_killed_says_so(fresh):
    handle = fresh.commands.run("sleep 60", background=True)
    killer = threading.Thread(target=fresh.kill)
    killer.start()
    # The old SDK sees the same, but over HTTP/1.1 it only guesses.
    words = "likely due to sandbox timeout" if OLD_SDK else "killed or reached its end of life"
    with pytest.raises(TimeoutException, match=words):
        handle.wait()
    killer.join()


def test_a_download_is_not_complete_when_the_sandbox_is_killed(fresh):
    fresh.commands.run("truncate -s 1G /tmp/endless")
    parts = fresh.files.read("/tmp/endless", format="stream")
    assert len(next(parts)) > 0
    assert fresh.kill()
    with pytest.raises(Exception):
        for _ in parts:
            pass


def test_timeout_fires_on_time(server):
    sandbox = Sandbox.create(timeout=4)
    end = sandbox.get_info().end_at
    until(lambda: not sandbox.is_running(), within=8, what="the end of the sandbox")
    assert now() >= end, "it ended too early"
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    until(lambda: sandbox.kill() is False, what="no sandbox to kill")


def test_set_timeout_counts_from_now_and_may_shorten(fresh):
    fresh.set_timeout(1000)
    assert 990 < seconds_left(fresh) <= 1000
    fresh.set_timeout(100)
    assert 90 < seconds_left(fresh) <= 100
    assert fresh.get_info().end_at == fresh.get_info().end_at
    fresh.set_timeout(0)
    until(lambda: not fresh.is_running(), within=3, what="the end of the sandbox")
    with pytest.raises(SandboxNotFoundException):
        fresh.set_timeout(10)


def test_connect_reaches_the_same_computer_and_never_shortens(fresh):
    fresh.files.write("/tmp/mark", "here")
    before = fresh.get_info().end_at
    other = Sandbox.connect(fresh.sandbox_id, timeout=10)
    assert other.sandbox_id == fresh.sandbox_id
    assert other.files.read("/tmp/mark") == "here"
    assert other.get_info().end_at == before
    Sandbox.connect(fresh.sandbox_id, timeout=2000)
    assert 1990 < seconds_left(fresh) <= 2000


def test_refreshes_only_extend(api, fresh):
    before = fresh.get_info().end_at
    assert api.post(f"/sandboxes/{fresh.sandbox_id}/refreshes", json={"duration": 5}).status_code == 204
    assert fresh.get_info().end_at == before
    assert api.post(f"/sandboxes/{fresh.sandbox_id}/refreshes", json={"duration": 3000}).status_code == 204
    assert 2990 < seconds_left(fresh) <= 3000


@pytest.mark.parametrize("path", ["/v2/sandboxes", "/sandboxes"])
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"templateID": "no-such-template"}, 404),
        ({"templateID": "not a name!"}, 400),
        ({"timeout": 0}, 400),
        ({"timeout": -1}, 400),
        ({"timeout": 86400 * 30}, 400),
    ],
)
def test_create_refuses_nonsense(api, path, change, status):
    body_of(api.post(path, json={"templateID": "base", "timeout": 30} | change), status)


def test_sdk_sees_the_refusals(server):
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("no-such-template")
    with pytest.raises(SandboxException, match="400"):
        Sandbox.create(timeout=-1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"timeout": 5}', b'{"templateID": 5}'])
def test_malformed_bodies_are_refused(api, content):
    response = api.post("/v2/sandboxes", content=content, headers={"Content-Type": "application/json"})
    body_of(response, 400)


@pytest.mark.parametrize("key", [None, "", "e2b_" + "0" * 40, "nonsense", "e2b_", "E2B_" + "a" * 40])
def test_without_a_valid_key_nothing_is_possible(anonymous, key):
    headers = {} if key is None else {"X-API-Key": key}
    for method, path in [
        ("GET", "/v2/sandboxes"),
        ("POST", "/v2/sandboxes"),
        ("GET", "/sandboxes/" + "0" * 20),
        ("DELETE", "/sandboxes/" + "0" * 20),
        ("GET", "/v1/sandboxes"),
    ]:
        body_of(anonymous.request(method, path, headers=headers), 401)


def test_sdk_with_a_wrong_key(server):
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)


@pytest.mark.parametrize("path", ["/sandboxes/{}", "/v1/sandboxes/{}", "/sandboxes/{}/timeout"])
def test_unknown_sandboxes_are_404(api, path):
    for name in ["0" * 20, "short"]:
        method = "POST" if path.endswith("timeout") else "GET"
        response = api.request(method, path.format(name), json={"timeout": 1} if method == "POST" else None)
        assert response.status_code in (400, 404), response.text
        body_of(response, response.status_code)


def test_metadata_is_kept_and_filters(server):
    tag = uuid.uuid4().hex
    awkward = {"tag": tag, "a b": "c=d&e", "ü": "100%", "plus": "1+1"}
    one = Sandbox.create(timeout=60, metadata=awkward)
    two = Sandbox.create(timeout=60, metadata={"tag": tag, "n": "2"})
    try:
        assert one.get_info().metadata == awkward

        def found(**metadata):
            listing = Sandbox.list(query=SandboxQuery(metadata={"tag": tag} | metadata))
            return {info.sandbox_id for page in pages(listing) for info in page}

        assert found() == {one.sandbox_id, two.sandbox_id}
        assert found(n="2") == {two.sandbox_id}
        assert found(plus="1+1", ü="100%") == {one.sandbox_id}
        assert found(**{"a b": "c=d&e"}) == {one.sandbox_id}
        assert found(n="3") == set()
    finally:
        one.kill()
        two.kill()


def test_listing_pages_in_order_and_filters(api, server):
    tag = uuid.uuid4().hex
    sandboxes = [Sandbox.create(timeout=60, metadata={"tag": tag}) for _ in range(3)]
    ids = [sandbox.sandbox_id for sandbox in sandboxes]
    query = SandboxQuery(metadata={"tag": tag})
    try:
        newest_first = [
            [info.sandbox_id for info in page] for page in pages(Sandbox.list(query=query, limit=1))
        ]
        assert newest_first == [[id] for id in reversed(ids)]
        oldest_first = [
            [info.sandbox_id for info in page]
            for page in pages(Sandbox.list(query=query, limit=2, order="asc"))
        ]
        assert oldest_first == [ids[:2], ids[2:]]

        # A page token holds while sandboxes come and go.
        paginator = Sandbox.list(query=query, limit=1)
        assert paginator.next_items()[0].sandbox_id == ids[2]
        sandboxes[2].kill()
        assert paginator.next_items()[0].sandbox_id == ids[1]
        assert paginator.next_items()[0].sandbox_id == ids[0]
        assert not paginator.has_next and paginator.next_token is None

        started = sandboxes[1].get_info().started_at
        later = SandboxQuery(metadata={"tag": tag}, started_after=started)
        assert [info.sandbox_id for info in Sandbox.list(query=later).next_items()] == [ids[1]]
        for template, count in [("base", 2), ("no-such-template", 0)]:
            same = SandboxQuery(metadata={"tag": tag}, template=template)
            assert len(Sandbox.list(query=same).next_items()) == count

        metadata = f"tag={tag}"
        old = api.get("/sandboxes", params={"metadata": metadata})
        assert old.status_code == 200 and {item["sandboxID"] for item in old.json()} == set(ids[:2])
        paused = api.get("/v2/sandboxes", params={"metadata": metadata, "state": "paused"})
        assert paused.json() == []
        for limit in ["0", "101", "x"]:
            body_of(api.get("/v2/sandboxes", params={"limit": limit}), 400)
        body_of(api.get("/v2/sandboxes", params={"nextToken": "%%%"}), 400)
    finally:
        for sandbox in sandboxes:
            sandbox.kill()


@pytest.mark.newest_sdk("it has no `idempotency_key`")
def test_the_same_idempotency_key_creates_once(api, server):
    key = str(uuid.uuid4())
    tag = {"tag": key}
    one = Sandbox.create(timeout=60, metadata=tag, idempotency_key=key)
    two = Sandbox.create(timeout=60, metadata=tag, idempotency_key=key)
    try:
        assert one.sandbox_id == two.sandbox_id
        assert two.commands.run("echo same").stdout == "same\n"
        assert len(Sandbox.list(query=SandboxQuery(metadata=tag)).next_items()) == 1
        other = api.post(
            "/v2/sandboxes",
            json={"templateID": "base", "timeout": 61},
            headers={"Idempotency-Key": key},
        )
        assert body_of(other, 422)["error_code"] == "idempotency_request_mismatch"
    finally:
        one.kill()


def test_many_at_once_with_one_idempotency_key_create_one(api, server):
    key = str(uuid.uuid4())
    answers = []

    def create():
        with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
            answers.append(
                client.post(
                    "/v2/sandboxes",
                    json={"templateID": "base", "timeout": 60, "metadata": {"tag": key}},
                    headers={"Idempotency-Key": key},
                )
            )

    threads = [threading.Thread(target=create) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    created = {answer.json()["sandboxID"] for answer in answers if answer.status_code == 201}
    try:
        assert len(created) == 1
        for answer in answers:
            if answer.status_code != 201:
                assert body_of(answer, 409)["error_code"] == "idempotency_in_progress"
    finally:
        for id in created:
            Sandbox.kill(id)


def test_the_old_create_and_its_defaults(api):
    response = api.post("/sandboxes", json={"templateID": "base"})
    assert response.status_code == 201, response.text
    id = response.json()["sandboxID"]
    try:
        assert {"templateID", "sandboxID", "clientID", "envdVersion"} <= response.json().keys()
        detail = api.get(f"/sandboxes/{id}").json()
        start, end = (datetime.datetime.fromisoformat(detail[name]) for name in ("startedAt", "endAt"))
        assert 14 < (end - start).total_seconds() < 16
        # Old clients still send ids with a client id behind a dash.
        assert api.get(f"/sandboxes/{id}-6532622b").status_code == 200
        connected = api.post(f"/sandboxes/{id}/connect", json={"timeout": 30})
        assert connected.status_code == 200 and connected.json()["sandboxID"] == id
    finally:
        assert api.delete(f"/sandboxes/{id}").status_code == 204
    gone = until(lambda: (r := api.delete(f"/sandboxes/{id}")).status_code != 204 and r, what="its end")
    body_of(gone, 404)


def test_native_answers_say_what_isolates(api, fresh):
    native = api.get(f"/v1/sandboxes/{fresh.sandbox_id}").json()
    assert (native["engine"], native["isolation"]) == ("gvisor", "userspace_kernel")
    assert native["network"] == "sealed"
    assert native["state"] == "running"


def test_health_needs_no_key(anonymous):
    assert anonymous.get("/health").status_code in (200, 204)


def test_unknown_routes_have_the_error_body(api):
    body_of(api.get("/no/such/route"), 404)


def test_environment_and_secrets_of_creation(server):
    with Sandbox.create(timeout=60, envs={"COLOUR": "blue", "QUOTED": "a 'b' \"c\" $d"}) as sandbox:
        out = sandbox.commands.run('printf "%s|%s" "$COLOUR" "$QUOTED"').stdout
        assert out == "blue|a 'b' \"c\" $d"
        assert sandbox.commands.run("echo $COLOUR", envs={"COLOUR": "red"}).stdout == "red\n"
        ours = sandbox.commands.run("env | grep ^E2B_ | sort").stdout
        assert "E2B_SANDBOX=true" in ours
        assert f"E2B_SANDBOX_ID={sandbox.sandbox_id}" in ours
        assert not re.search(r"e2b_[0-9a-f]{40}", sandbox.commands.run("env").stdout)


def test_another_teams_sandbox_does_not_exist(server, fresh):
    server.cli("team", "create", "--data-dir", str(server.data_dir), f"other-{fresh.sandbox_id}")
    made = server.cli(
        "key", "create", "--data-dir", str(server.data_dir), "--team", f"other-{fresh.sandbox_id}"
    )
    key = re.search(r"e2b_[0-9a-f]{40}", made.stdout)[0]
    assert Sandbox.kill(fresh.sandbox_id, api_key=key) is False
    with pytest.raises(NotFoundException):
        Sandbox.get_info(fresh.sandbox_id, api_key=key)
    listing = Sandbox.list(api_key=key)
    assert listing.next_items() == []
    assert fresh.is_running()


def test_what_a_sandbox_uses_is_told_every_few_seconds(fresh):
    began = now()
    assert fresh.get_metrics(end=began - datetime.timedelta(hours=1)) == []
    first = until(fresh.get_metrics, 30, "the first sample")[0]
    assert 0 < first.mem_used <= first.mem_total
    assert 0 < first.disk_used <= first.disk_total
    assert first.cpu_count > 0
    # One that works shows it, and its memory.
    fresh.commands.run("timeout 60 python3 -c 'x = bytes([1]) * (200 << 20)\nwhile True: pass'", background=True, timeout=0)

    def busy():
        return [one for one in fresh.get_metrics() if one.cpu_used_pct > 5 and one.mem_used > 200 << 20]

    seen = until(busy, 40, "a sample of a busy sandbox")[-1]
    assert seen.cpu_used_pct <= 100
    times = [one.timestamp for one in fresh.get_metrics()]
    assert times == sorted(times) and len(set(times)) == len(times)
    # A window has both of its ends, in whole seconds.
    assert seen.timestamp in [one.timestamp for one in fresh.get_metrics(start=seen.timestamp, end=seen.timestamp)]


def test_metrics_of_several_and_of_others(server, fresh, api):
    until(fresh.get_metrics, 30, "the first sample")
    asked = f"{fresh.sandbox_id},{'z' * 20}"
    answer = api.get("/sandboxes/metrics", params={"sandbox_ids": asked})
    assert list(answer.json()["sandboxes"]) == [fresh.sandbox_id]
    body_of(api.get("/sandboxes/metrics"), 400)
    body_of(api.get("/sandboxes/metrics", params={"sandbox_ids": ",".join(["z" * 20] * 101)}), 400)
    body_of(api.get(f"/sandboxes/{fresh.sandbox_id}/metrics", params={"start": 9, "end": 8}), 400)
    body_of(api.get(f"/sandboxes/{fresh.sandbox_id}/metrics", params={"start": "now"}), 400)
    body_of(api.get(f"/sandboxes/{'z' * 20}/metrics"), 404)
