"""Models from inside of a sandbox, with the clients that their providers publish; the provider is scripted."""

import json

import gateway
import httpx
import pytest
from e2b import CommandExitException, Sandbox
from gateway import CANARY, HELLO, asked_for, bring_clients, grant, holds, plain, upstream  # noqa: F401 (a fixture)
from support import until
from upstream import Picture, Status, Turn, Use


@pytest.fixture(scope="module")
def models(server, servers, work_folder, upstream):
    return gateway.serve(servers, work_folder, "models", upstream)


@pytest.fixture(scope="module")
def box(models):
    """One that all tests share, with the providers' clients in it."""
    with Sandbox.create(timeout=600, **models.opts) as sandbox:
        bring_clients(sandbox)
        yield sandbox


@pytest.fixture
def granted(models, box, upstream):
    upstream.asked.clear()
    granted = grant(models, box)
    yield granted
    granted.close()
    assert not upstream.unexpected


ANTHROPIC = """
import anthropic, json
client = anthropic.Anthropic(max_retries=0)
ask = dict(model="latest", max_tokens=900, messages=[{"role": "user", "content": "what time is it?"}])
whole = client.messages.create(**ask)
with client.messages.stream(**ask) as stream:
    pieces = list(stream.text_stream)
count = client.messages.count_tokens(model="large", messages=ask["messages"]).input_tokens
names = [model.id for model in client.models.list()]
print(json.dumps([whole.content[0].text, pieces, whole.usage.output_tokens, count > 0, names]))
"""


def test_the_client_of_anthropic_is_answered(granted, upstream):
    upstream.script(Turn("noon"), Turn("half past noon", pieces=3))
    text, pieces, output, counted, names = json.loads(granted.run(ANTHROPIC))
    assert (text, "".join(pieces), output, counted) == ("noon", "half past noon", 20, True)
    assert names == ["large", "small"]
    assert len(pieces) == 3
    for asked in upstream.calls():
        assert asked.key == CANARY and asked.body["model"] == "large-2026" and asked.body["max_tokens"] == 900
        assert asked.headers["accept-encoding"] == "identity" and granted.token not in str(asked.headers)
    # 100 tokens in, 20 out, twice.
    money = granted.money()
    assert (money["charged_micros"], money["reserved_micros"], money["overrun_micros"]) == (280, 0, 0)
    assert [call["model"] for call in money["calls"]] == ["large", "large"]
    assert money["calls"][0]["usage"]["output"] == 20 and not money["calls"][0]["estimated"]


OPENAI = """
import json, openai
client = openai.OpenAI(max_retries=0)
chat = dict(model="small", messages=[{"role": "user", "content": "hello"}])
whole = client.chat.completions.create(**chat).choices[0].message.content
pieces = [c.choices[0].delta.content for c in client.chat.completions.create(stream=True, **chat) if c.choices]
chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **chat))
answer = client.responses.create(model="small", input="hello").output_text
with client.responses.stream(model="small", input="hello") as stream:
    kinds = [event.type for event in stream]
picture = client.images.generate(model="small", prompt="a dot").data[0].b64_json
names = [model.id for model in client.models.list()]
print(json.dumps([whole, [p for p in pieces if p], chunks[-1].usage.completion_tokens, answer, kinds[-1], len(picture) > 20, names]))
"""


def test_the_client_of_openai_is_answered_on_all_its_routes(granted, upstream):
    upstream.script(*[Turn(f"turn {number}") for number in range(5)], Picture())
    whole, pieces, used, answer, last, picture, names = json.loads(granted.run(OPENAI))
    assert (whole, "".join(pieces), used, answer) == ("turn 0", "turn 1", 20, "turn 3")
    assert (last, picture, names) == ("response.completed", True, ["large", "small"])
    assert [asked.dialect for asked in upstream.calls()] == ["chat"] * 3 + ["responses"] * 2 + ["images"]
    for asked in upstream.calls():
        assert asked.headers["authorization"] == f"Bearer {CANARY}" and "x-api-key" not in asked.headers
    streamed = upstream.calls()[1].body
    assert streamed["stream_options"]["include_usage"] is True, "it would not be told what was used"
    assert upstream.calls()[3].body["store"] is False
    money = granted.money()
    assert len(money["calls"]) == 6 and not any(call["estimated"] for call in money["calls"])
    assert money["charged_micros"] == 5 * 140 + 12 + 1056


def test_the_end_of_the_money_is_said_in_each_protocol_and_nobody_asks_again(models, upstream, box):
    upstream.asked.clear()
    poor = grant(models, box, most=50)
    refusals = """
import anthropic, json, openai
found = []
a, o = anthropic.Anthropic(), openai.OpenAI()
for call in (
    lambda: a.messages.create(model="large", max_tokens=9000, messages=[{"role": "user", "content": "x" * 300}]),
    lambda: o.chat.completions.create(model="large", messages=[{"role": "user", "content": "x" * 300}]),
    lambda: o.responses.create(model="large", input="x" * 300),
):
    try:
        call()
    except Exception as error:
        found.append([type(error).__name__, error.status_code, error.response.headers["x-should-retry"], error.body])
print(json.dumps(found))
"""
    try:
        first, *others = json.loads(poor.run(refusals))
    finally:
        assert poor.close()["charged_micros"] == 0
    assert first[1:3] == [402, "false"] and first[3]["error"]["type"] == "billing_error"
    for other in others:
        assert other[:3] == ["RateLimitError", 429, "false"] and other[3]["code"] == "insufficient_quota"
    assert not upstream.asked, "nothing goes out that there is no money for"


def test_what_a_provider_runs_itself_is_left_out_and_what_it_keeps_is_refused(granted, upstream):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "shell", "input_schema": {"type": "object"}}]
    upstream.script(Turn(uses=(Use("shell", {"command": "date"}),)))
    assert plain(granted, HELLO | {"tools": tools})["status"] == 200
    assert upstream.calls()[0].tools() == ["shell"]
    chat = {"model": "small", "input": "x"}
    for member, value in {"background": True, "previous_response_id": "resp_1", "conversation": "conv_1"}.items():
        told = plain(granted, chat | {member: value}, "/v1/responses")
        assert told["status"] == 400 and member in told["json"]["error"]["message"]
        assert told["headers"]["x-should-retry"] == "false"
    assert len(upstream.calls()) == 1


def test_errors_of_the_provider_are_told_without_its_account_and_cost_nothing(granted, upstream):
    secret = f"your key {CANARY} is overdrawn"
    upstream.script(
        Status(429, "rate_limit_error", "slow down", retry_after=7),
        Status(500, message=secret),
        Status(401, "authentication_error", secret),
        Status(302, headers={"Location": "http://169.254.169.254/"}),
    )
    limited, failed, refused, moved = (plain(granted) for _ in range(4))
    assert (limited["status"], limited["headers"]["retry-after"]) == (429, "7")
    assert "slow down" not in limited["json"]["error"]["message"], "whose limit it is says something of the account"
    assert limited["headers"]["x-should-retry"] == "true"
    assert failed["status"] == 500 and failed["json"]["error"]["message"] == secret.replace(CANARY, "*" * len(CANARY))
    assert refused["status"] == 502 and moved["status"] == 502
    assert refused["headers"]["x-should-retry"] == "false", "nobody but the operator can mend that"
    for told in (limited, failed, refused, moved):
        assert CANARY not in str(told) and "set-cookie" not in told["headers"]
        assert not any(name.startswith("openai-") for name in told["headers"])
    assert len(upstream.asked) == 4, "no redirect is followed, and nothing is sent twice"
    money = granted.money()
    assert (money["charged_micros"], money["reserved_micros"]) == (0, 0)


def test_the_name_is_there_for_whoever_was_granted_it_and_in_receipts(models, upstream, box):
    upstream.script(Turn("hi"))
    with Sandbox.create(timeout=60, **models.opts) as other:
        with pytest.raises(CommandExitException):
            other.commands.run("getent hosts models.internal")
        explain = f"{models.url}/v1/sandboxes/{other.sandbox_id}/egress/explain?host=models.internal&port=80"
        told = httpx.get(explain, headers=models.headers).json()
        assert (told["allowed"], told["rule"]) == (False, "always/not-granted") and "models" in told["remedy"]
        granted = grant(models, other)
        told = httpx.get(explain, headers=models.headers).json()
        assert (told["allowed"], told["rule"]) == (True, "grant/models")
        assert plain(granted)["status"] == 200
        receipts = httpx.get(
            f"{models.url}/v1/sandboxes/{other.sandbox_id}/egress", headers=models.headers
        ).text
        assert "grant/models" in receipts and CANARY not in receipts and granted.token not in receipts
    # Its budget goes with it.
    until(lambda: granted.money()["closed_at"], what="a closed budget")


def test_a_fork_spends_of_the_same_and_a_snapshot_of_nothing(models, upstream):
    upstream.always(Turn("hi"))
    with Sandbox.create(timeout=120, **models.opts) as source:
        granted = grant(models, source, most=10_000)
        made = httpx.post(
            f"{models.url}/sandboxes/{source.sandbox_id}/fork", headers=models.headers, json={}, timeout=60
        )
        assert made.status_code == 201, made.text
        fork = Sandbox.connect(made.json()[0]["sandbox"]["sandboxID"], **models.opts)
        snapshot = httpx.post(
            f"{models.url}/sandboxes/{source.sandbox_id}/snapshots", headers=models.headers, json={}, timeout=60
        )
        copy = Sandbox.create(snapshot.json()["snapshotID"], timeout=60, **models.opts)
        in_fork = gateway.Granted(models, fork, granted.budget, granted.token)
        in_copy = gateway.Granted(models, copy, granted.budget, granted.token)
        assert plain(granted)["status"] == 200 and plain(in_fork)["status"] == 200
        assert len(granted.money()["calls"]) == 2
        assert plain(in_copy)["status"] == 0, "the name is not there"
        copy.kill()
        source.kill()
        assert plain(in_fork)["status"] == 200, "it lives on, and so does the money"
        assert granted.money()["closed_at"] is None
        fork.kill()
        until(lambda: granted.money()["closed_at"], what="a closed budget")
    upstream.script()


def test_what_can_t_be_granted_is_refused(models, server, box):
    for body, status in [
        ({"max_cost_micros": 0}, 400),
        ({"max_cost_micros": 10**15}, 400),
        ({"max_cost_micros": 1, "models": ["gigantic"]}, 404),
        ({"max_cost_micros": 1, "timeout_seconds": 10**9}, 400),
    ]:
        assert asked_for(models, box.sandbox_id, **body).status_code == status, body
    assert asked_for(models, "i" * 20, max_cost_micros=1).status_code == 404
    # A server without models says so.
    with Sandbox.create(timeout=60, **server.opts) as plain_box:
        refused = asked_for(server, plain_box.sandbox_id, max_cost_micros=1)
        assert refused.status_code == 501 and "[models]" in refused.json()["message"]


def test_the_key_is_nowhere_that_a_sandbox_a_log_or_a_receipt_is(models, granted, upstream, work_folder):
    upstream.script(Turn("hi"), Status(500, message=f"the key {CANARY}"))
    assert plain(granted)["status"] == 200 and plain(granted)["status"] == 500
    snapshot = httpx.post(
        f"{models.url}/sandboxes/{granted.sandbox.sandbox_id}/snapshots", headers=models.headers, json={}, timeout=120
    )
    assert snapshot.status_code == 201
    # The control: its memory and its disk are searched, and the token is in them.
    assert holds(models.data_dir, granted.token.encode()), "what a sandbox has is in its image"
    assert not holds(models.data_dir, CANARY.encode())
    assert CANARY.encode() not in models.log_path.read_bytes() and granted.token.encode() not in models.log_path.read_bytes()
    metrics = httpx.get(f"{models.url}/metrics", headers=models.headers).text
    assert "sandglass_model_calls_total{outcome=\"released\"}" in metrics and CANARY not in metrics
