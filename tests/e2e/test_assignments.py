"""One sandbox for each of an application's users, however often and from wherever it is asked for."""

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import pytest
from e2b import Sandbox
from faults import crash, log_size, reached
from support import until
from test_bad_input import admin
from test_pause import call

BODY = {"templateID": "base", "timeout": 120, "metadata": {"made": "for a user"}}


def path(user: str) -> str:
    return f"/v1/assignments/{quote(user, safe='')}"


def assign(server, user: str, **more):
    return call(server, "PUT", path(user), json=BODY | more)


def of_user(server, user: str) -> dict:
    response = call(server, "GET", path(user))
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def user(server, request):
    name = f"{request.node.name} / Zoë"
    yield name
    for one in call(server, "GET", path(name)).json().get("history", []):
        Sandbox.kill(one["sandbox"])


def test_a_user_has_one_that_is_kept_resumed_and_replaced(server, user):
    assert call(server, "GET", path(user)).status_code == 404
    first = assign(server, user)
    assert (first.status_code, first.json()["came_by"]) == (201, "created"), first.text
    made = first.json()["sandbox"]
    assert made["metadata"] == BODY["metadata"] and first.json()["user"] == user
    box = Sandbox.connect(made["id"])
    box.files.write("/home/user/own", "kept")

    again = assign(server, user, metadata={"made": "again"})
    assert (again.status_code, again.json()["came_by"]) == (200, "found"), again.text
    assert again.json()["sandbox"]["id"] == made["id"]
    assert again.json()["sandbox"]["metadata"] == BODY["metadata"]

    box.pause()
    assert of_user(server, user)["sandbox"]["state"] == "paused"
    back = assign(server, user)
    assert (back.status_code, back.json()["came_by"]) == (200, "resumed"), back.text
    assert back.json()["sandbox"]["generation"] == 2
    assert Sandbox.connect(made["id"]).files.read("/home/user/own") == "kept"

    Sandbox.kill(made["id"])
    assert of_user(server, user)["sandbox"] is None
    other = assign(server, user).json()["sandbox"]["id"]
    assert other != made["id"]
    history = of_user(server, user)["history"]
    assert [one["sandbox"] for one in history] == [other, made["id"]]
    assert history[0]["until"] is None and history[1]["until"] >= history[1]["since"]


def test_many_requests_at_once_make_one(server, user):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: assign(server, user), range(16)))
    assert {answer.status_code for answer in answers} == {200, 201}, [answer.text for answer in answers]
    assert len({answer.json()["sandbox"]["id"] for answer in answers}) == 1
    assert [answer.status_code for answer in answers].count(201) == 1
    assert len(of_user(server, user)["history"]) == 1


def test_a_released_one_lives_on_and_is_nobody_s(server, user):
    made = assign(server, user).json()["sandbox"]["id"]
    assert call(server, "DELETE", path(user)).status_code == 204
    assert call(server, "DELETE", path(user)).status_code == 404
    assert Sandbox.connect(made).is_running()
    assert assign(server, user).json()["sandbox"]["id"] != made


@pytest.mark.parametrize("name", ["a" * 129, "a\nb", "\0"])
def test_odd_users_are_refused(server, name):
    for method in ("GET", "PUT", "DELETE"):
        response = call(server, method, path(name), **({"json": BODY} if method == "PUT" else {}))
        assert response.status_code == 400, response.text
        assert "user" in response.json()["message"]
    assert call(server, "PUT", "/v1/assignments/%ff", json=BODY).status_code == 400


def test_what_can_not_be_made_is_nobody_s(server, user):
    assert assign(server, user, templateID="no-such").status_code == 404
    assert assign(server, user, timeout=0).status_code == 400
    assert call(server, "GET", path(user)).status_code == 404


def test_the_users_of_another_team_are_others(lone_server):
    server = lone_server
    admin(server, "team", "create", "other")
    other = re.search(r"e2b_[0-9a-f]{40}", admin(server, "key", "create", "--team", "other"))[0]
    mine = assign(server, "zoe").json()["sandbox"]["id"]
    theirs = call(server, "PUT", path("zoe"), json=BODY, key=other)
    assert theirs.status_code == 201 and theirs.json()["sandbox"]["id"] != mine
    assert call(server, "DELETE", path("zoe"), key=other).status_code == 204
    assert of_user(server, "zoe")["sandbox"]["id"] == mine
    Sandbox.kill(theirs.json()["sandbox"]["id"], api_key=other, api_url=server.url)


@pytest.mark.parametrize("victim", ["serve", "host", "both"])
def test_killed_in_the_middle_there_is_still_one(lone_server, victim):
    server = lone_server
    mine = assign(server, "zoe").json()["sandbox"]["id"]
    crash(server, victim)
    server.start()
    assert assign(server, "zoe").json()["sandbox"]["id"] == mine
    Sandbox.kill(mine, **server.opts)
    for point in ("control.create.insert", "control.create.own", "control.create.start"):
        server.stop()
        log_from = log_size(server)
        server.start(failpoints=f"{point}=hang")
        with ThreadPoolExecutor(1) as pool:
            cut_off = pool.submit(assign, server, "zoe")
            until(lambda: point in reached(server, log_from), within=60, what=f"{point} to be reached")  # noqa: B023
            crash(server, victim)
            assert isinstance(cut_off.exception(), httpx.TransportError), cut_off
        server.start()
        answer = assign(server, "zoe")
        assert answer.status_code in (200, 201), answer.text
        made = answer.json()["sandbox"]["id"]
        alive = call(server, "GET", "/v2/sandboxes?state=running,paused").json()
        assert [one["sandboxID"] for one in alive] == [made]
        Sandbox.kill(made, **server.opts)
        until(lambda: of_user(server, "zoe")["sandbox"] is None, within=60, what="its end")
