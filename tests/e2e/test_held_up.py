"""What the packet filter of an airlock holds up by itself: no byte of it gets out, and each attempt has its receipt."""

import time

import pytest
from e2b import Sandbox
from estate import SERVER, Outpost, outpost_in
from support import until

CONFIG = """
[[egress.ceiling]]
id = "everywhere"
allow = "0.0.0.0/0"
ports = [80, 443]
"""

POLICY = {"allowOut": ["0.0.0.0/0"]}


@pytest.fixture(scope="module")
def outpost(server, estate, work_folder):
    """A server in the estate. The one that all tests share has prepared the template."""
    with outpost_in(estate, work_folder, "held-up", CONFIG) as outpost:
        yield outpost


@pytest.fixture
def box(outpost):
    box = outpost.make(network=POLICY)
    yield box
    box.kill()


def receipts(outpost: Outpost, box: Sandbox) -> list[dict]:
    lines = outpost.ask("GET", f"/v1/sandboxes/{box.sandbox_id}/egress?limit=1000").json()
    return [line["receipt"] for line in lines]


def run(box: Sandbox, program: str) -> str:
    box.files.write("/tmp/program.py", program)
    return box.commands.run("python3 /tmp/program.py", user="root", timeout=60).stdout


def denied(outpost: Outpost) -> float:
    name = 'sandglass_egress_verdicts_total{kind="connection",outcome="denied"} '
    text = outpost.ask("GET", "/metrics").text
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


CONNECT = """
import socket
for address, port in {targets}:
    try:
        socket.create_connection((address, port), timeout=5)
        raise SystemExit(f"{{address}} is reached")
    except ConnectionRefusedError:
        pass
"""


def of(lines: list[dict], address: str, transport: str) -> list[tuple[int, str, str]]:
    return [
        (line["port"], line["rule"], line["outcome"])
        for line in lines
        if line.get("address") == address and line.get("transport") == transport
    ]


def test_each_attempt_has_one_receipt_that_says_what_explain_says(outpost, box):
    targets = [
        ("169.254.169.254", 80, "always/metadata"),
        ("100.100.100.200", 80, "always/metadata"),
        ("10.0.0.1", 443, "always/private"),
        ("192.168.77.1", 8080, "always/private"),
        ("10.11.12.1", 22, "always/sandbox"),
    ]
    before = denied(outpost)
    run(box, CONNECT.format(targets=[target[:2] for target in targets] * 2))
    for address, port, rule in targets:
        wanted = [(port, rule, "denied")] * 2
        until(lambda: of(receipts(outpost, box), address, "tcp") == wanted, what=f"receipts for {address}")  # noqa: B023
        told = outpost.ask("GET", f"/v1/sandboxes/{box.sandbox_id}/egress/explain?host={address}&port={port}").json()
        assert (told["allowed"], told["rule"]) == (False, rule)
    assert denied(outpost) == before + 2 * len(targets)


SEND = """
import socket
for port in (123, 443):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(20):
        s.sendto(b"x", ("{address}", port))
"""


@pytest.mark.parametrize(("address", "rule"), [("93.184.216.34", "always/udp"), ("169.254.169.254", "always/metadata")])
def test_each_flow_of_datagrams_has_one_receipt(outpost, box, address, rule):
    run(box, SEND.format(address=address))
    wanted = [(123, rule, "denied"), (443, rule, "denied")]
    until(lambda: of(receipts(outpost, box), address, "udp") == wanted, what="two receipts")
    # A connection that is written down later comes behind all of them.
    run(box, CONNECT.format(targets=[("10.0.0.1", 1)]))
    until(lambda: of(receipts(outpost, box), "10.0.0.1", "tcp"), what="the receipt of a connection")
    assert of(receipts(outpost, box), address, "udp") == wanted


def test_a_server_s_own_address_is_told_once_by_whoever_resets_it(outpost, box):
    run(box, CONNECT.format(targets=[(SERVER, 80)]))
    until(lambda: of(receipts(outpost, box), SERVER, "tcp"), what="its receipt")
    assert len(of(receipts(outpost, box), SERVER, "tcp")) == 1


FLOOD = """
import socket
for _ in range(6000):
    with socket.socket() as s:
        assert s.connect_ex(("10.99.0.1", 80)) != 0
"""


def test_a_flood_costs_few_receipts_and_all_of_it_is_counted(outpost, box):
    before, started = denied(outpost), time.monotonic()
    run(box, FLOOD)
    sent = 6000

    # One more attempt shows where the flood ends, and its receipt how many had none before it.
    def told():
        run(box, CONNECT.format(targets=[("10.99.0.2", 80)]))
        return of(receipts(outpost, box), "10.99.0.2", "tcp")

    until(told, within=60, what="the attempt after the flood")
    lines = receipts(outpost, box)
    flood = [line for line in lines if line.get("address") == "10.99.0.1"]
    took = time.monotonic() - started
    assert 0 < len(flood) <= 200 + 20 * took, len(flood)
    attempts = [line for line in lines if line.get("address") == "10.99.0.2"]
    lost = sum(line.get("lost", 0) for line in lines)
    assert len(flood) + lost >= sent, f"{len(flood)} receipts, {lost} counted, {sent} sent"
    assert denied(outpost) - before >= sent + len(attempts)
    # The server serves on, and so does the sandbox.
    assert box.commands.run("echo on").stdout == "on\n"


def test_a_server_that_was_killed_takes_the_log_up_again(outpost, box):
    run(box, CONNECT.format(targets=[("10.0.0.1", 81)]))
    until(lambda: of(receipts(outpost, box), "10.0.0.1", "tcp"), what="the receipt before")
    outpost.kill()
    outpost.start()
    run(box, CONNECT.format(targets=[("10.0.0.1", 82)]))
    ports = [81, 82]
    until(
        lambda: [line[0] for line in of(receipts(outpost, box), "10.0.0.1", "tcp")] == ports,
        what="the receipt after",
    )
