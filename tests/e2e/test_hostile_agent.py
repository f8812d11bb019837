"""Agents that have turned against their server: each costs its own sandbox, in bounded time, and nothing else."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from guest import routing
from support import PeakMemory
from wire import Wire

SOURCE = Path(__file__).with_name("hostile_agent.py").read_text()
BOUND_MIB = 96


class Agents:
    """A server whose sandboxes all have a hostile agent."""

    def __init__(self, servers, folder: Path, before_hello: str = ""):
        program = folder / f"agent-{before_hello or 'later'}"
        program.write_text(SOURCE.replace("@BEFORE@", before_hello))
        program.chmod(0o755)
        self.server = servers.make("--guest", str(program))
        self.http = httpx.Client(base_url=self.server.url, headers=self.server.headers, timeout=110)

    def create(self, play: str = "") -> httpx.Response:
        """Asks for a sandbox whose agent is to play that."""
        body = {"templateID": "base", "timeout": 300, "envVars": {"PLAY": play}}
        return self.http.post("/v2/sandboxes", json=body)

    def sandbox(self, play: str = "") -> str:
        answer = self.create(play)
        assert answer.status_code == 201, (play, answer.text, self.server.log_tail())
        return answer.json()["sandboxID"]

    def ask(self, id: str, path: str = "/health") -> httpx.Response:
        headers = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "49983"}
        return httpx.get(self.server.url + path, headers=headers, timeout=110)


@pytest.fixture(scope="module")
def agents(servers, work_folder):
    return Agents(servers, work_folder)


@pytest.fixture(scope="module")
def honest(agents):
    """A sandbox of the same server whose agent does what it should; it is well when the others are through."""
    id = agents.sandbox("honest")
    yield id
    assert agents.ask(id).text.startswith("turn ")
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204


@pytest.fixture(scope="module", autouse=True)
def without_hello(servers, work_folder):
    """Servers of agents that never get to their hello, each with a create under way.

    The server is patient with some of them, so this goes on while the other tests run.
    """
    kinds = ["mute", "floods", "revision", "quits"]
    with ThreadPoolExecutor(len(kinds)) as pool:
        made = list(pool.map(lambda kind: Agents(servers, work_folder, kind), kinds))
        memory = [PeakMemory(*agents.server.halves) for agents in made]
        creates = [pool.submit(agents.create) for agents in made]
        yield list(zip(kinds, made, memory, creates, strict=True))


@pytest.fixture(autouse=True)
def unharmed(agents, honest):
    memory = PeakMemory(*agents.server.halves)
    yield
    assert agents.ask(honest).text.startswith("turn ")
    assert memory.rise() < BOUND_MIB


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code in (500, 504), answer.text
    body = answer.json()
    assert body["code"] == answer.status_code
    assert "agent" in body["message"] or "as soon as it was started" in body["message"], body
    # What the agent says is for the operator, not for clients.
    assert "forged" not in body["message"]
    return body["message"]


# What an agent can do instead of taking its configuration.
NO_CONFIGURATION = [
    "wrong generation",
    "generation too large",
    "hello twice",
    "refused",
    "silent",
    "quits",
    "kills its engine",
    "notices",
    "floods",
]


def test_agents_that_do_not_take_their_configuration(agents, honest):
    """Each create fails, while another sandbox is asked all the time and answers."""
    over = threading.Event()
    failures = []

    def keep_asking():
        while not over.is_set():
            answer = agents.ask(honest)
            if not answer.text.startswith("turn "):
                failures.append(answer.text)
            time.sleep(0.05)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        with ThreadPoolExecutor(len(NO_CONFIGURATION)) as pool:
            for play, answer in zip(NO_CONFIGURATION, pool.map(agents.create, NO_CONFIGURATION), strict=True):
                assert refusal(answer), play
    finally:
        over.set()
        asking.join()
    assert not failures
    log = agents.server.log_path.read_text()
    # Its words are cut short, and none of them can pass for a line of the log or move a cursor.
    assert "\x1b[31mforged" not in log and "\nforged" not in log
    assert len(log) < 4 << 20
    listed = agents.http.get("/v2/sandboxes").json()
    assert [sandbox["sandboxID"] for sandbox in listed] == [honest]


BAD_GATEWAY = [
    "garbage",
    "endless head",
    "endless line",
    "many headers",
    "two lengths",
    "switches",
    "closes",
    "resets",
    "never opens",
]


@pytest.mark.parametrize("play", BAD_GATEWAY)
def test_answers_that_are_none_become_502(agents, play):
    id = agents.sandbox(play)
    answer = agents.ask(id)
    body = answer.json()
    assert (answer.status_code, body["code"], body["sandboxId"]) == (502, 502, id)
    assert body["message"] == "The sandbox is running but did not answer"
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204


def test_an_answer_before_the_question_is_none_or_the_answer(agents):
    """Which of the two comes first is nobody's to say; but it answers this question only."""
    id = agents.sandbox("answers before it is asked")
    answer = agents.ask(id)
    assert answer.status_code == 502 or (answer.status_code, answer.text) == (200, "turn 1"), answer.text
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204


def test_answers_before_the_answer_do_not_go_on_for_ever(agents):
    """Thousands of "100 Continue", and then the end."""
    id = agents.sandbox("endless 100")
    assert agents.ask(id).status_code == 502
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204


def test_a_truncated_answer_is_not_taken_for_whole(agents):
    id = agents.sandbox("truncated")
    with pytest.raises(httpx.RemoteProtocolError):
        agents.ask(id)
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204


def test_nothing_is_smuggled_behind_an_answer(agents):
    """The next request on the client's connection gets its own answer, not what was left behind the first."""
    id = agents.sandbox("smuggled")
    other = agents.sandbox("honest")
    with Wire(agents.server) as wire:
        to = {"E2b-Sandbox-Port": "49983"}
        for turn in (1, 2, 3):
            assert wire.ask("GET", "/x", to | {"E2b-Sandbox-Id": id}).body == b"turn %d" % turn
            assert wire.ask("GET", "/x", to | {"E2b-Sandbox-Id": other}).body == b"turn %d" % turn
    for sandbox in (id, other):
        assert agents.http.delete(f"/sandboxes/{sandbox}").status_code == 204


def test_who_opens_twice_or_says_more_than_once_that_it_ends_confuses_nobody(agents):
    id = agents.sandbox("opens twice")
    for turn in (1, 2):
        assert agents.ask(id).text == f"turn {turn}"
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204


@pytest.mark.parametrize("play", ["endless body", "more than the window"])
def test_bodies_without_end_stay_in_the_sandbox(agents, play):
    """Clients that do not read them, and many of them."""
    id = agents.sandbox(play)
    wires = [Wire(agents.server, 16 << 10) for _ in range(32)]
    for wire in wires:
        lines = f"Host: x\r\nConnection: close\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 49983\r\n"
        wire.sendall(f"GET / HTTP/1.1\r\n{lines}\r\n".encode())
    for wire in wires:
        assert wire.until(b"\r\n").startswith((b"HTTP/1.1 200", b"HTTP/1.1 502"))
    # It can be ended while all of them wait.
    assert agents.http.delete(f"/sandboxes/{id}").status_code == 204
    for wire in wires:
        assert not wire.rest().endswith(b"\r\n0\r\n\r\n")
        wire.close()


def test_agents_that_do_not_say_hello(without_hello):
    """Mute, drowning the server in noise, of a revision that nobody knows, or gone."""
    for kind, agents, memory, create in without_hello:
        assert refusal(create.result()), kind
        agents.server.assert_nothing_left()
        assert memory.rise() < BOUND_MIB
        log = agents.server.log_path.read_text()
        assert "\x1b[31m" not in log and len(log) < 1 << 20


def test_nothing_is_left_of_any_of_them(agents, honest):
    """The last of this file: only the honest one is left, and the ledger knows all of its parts."""
    code, ledger = agents.server.ledger()
    assert code == 0 and ledger["clean"] is True, ledger
