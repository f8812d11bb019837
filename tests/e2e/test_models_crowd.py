"""Many who call models at the same time, and what one of them can do to others."""

import json

import gateway
import pytest
from gateway import CANARY, HELLO, box, grant, granted, plain, upstream  # noqa: F401 (fixtures)
from upstream import Gone, Raw, Turn, Usage

# Another provider, which speaks one protocol.
CHATTY = """
[models.providers.chatty]
base_url = "{url}"
dialects = ["chat"]
[models.offered.chatty]
provider = "chatty"
price = {price}
"""


@pytest.fixture(scope="module")
def models(server, servers, work_folder, upstream):
    chatty = CHATTY.format(url=upstream.url, price=gateway.PRICE)
    return gateway.serve(servers, work_folder, "crowd", upstream, chatty)


TWO = """
import json, os, threading, time, urllib.error, urllib.request
body = os.environ["BODY"].encode()
headers = {"content-type": "application/json", "x-api-key": os.environ["SANDGLASS_MODEL_TOKEN"]}
found = []
def ask():
    request = urllib.request.Request("http://models.internal/v1/messages", body, headers)
    try:
        found.append(urllib.request.urlopen(request, timeout=60).status)
    except urllib.error.HTTPError as error:
        found.append(error.code)
first = threading.Thread(target=ask)
first.start()
time.sleep(1)
ask()
first.join()
print(json.dumps(found))
"""


def test_who_finds_all_money_set_aside_waits_for_what_comes_back(models, box, upstream):
    upstream.script(Turn("hi", before=6, usage=Usage(input=30, output=10)), Turn("hi", usage=Usage(input=30, output=10)))
    # The first sets nearly all of it aside, and comes to a tenth.
    poor = grant(models, box, most=400)
    try:
        assert json.loads(poor.run(TWO, BODY=json.dumps(HELLO))) == [200, 200]
    finally:
        assert poor.close()["charged_micros"] == 100


def test_how_long_a_call_would_be_is_asked_of_nobody_who_does_not_speak_so(granted, upstream):
    upstream.script(Turn("hi"))
    assert plain(granted, HELLO | {"model": "chatty"}, "/v1/chat/completions")["status"] == 200
    told = plain(granted, HELLO | {"model": "chatty"}, "/v1/messages/count_tokens")
    assert told["status"] == 404 and "does not speak" in told["json"]["error"]["message"]
    assert len(upstream.asked) == 1


def test_what_was_paid_for_in_full_is_not_asked_again(granted, upstream):
    upstream.script(Gone(), Gone())
    whole = plain(granted)
    assert (whole["status"], whole["headers"]["x-should-retry"]) == (502, "false")
    # Of a stream there would have been a beginning.
    streamed = plain(granted, HELLO | {"stream": True})
    assert (streamed["status"], streamed["headers"]["x-should-retry"]) == (502, "true")
    first, second = granted.money()["calls"]
    assert first["charged_micros"] == first["reserved_micros"] and first["estimated"]
    assert 0 < second["charged_micros"] < second["reserved_micros"] // 2 and second["estimated"]


def test_a_key_is_taken_out_of_answers_as_well(granted, upstream):
    said = {"content": [{"type": "text", "text": f"it is {CANARY}"}], "usage": {"input_tokens": 1, "output_tokens": 1}}
    body = json.dumps(said).replace("canary-", "canary\\u002d").encode()
    upstream.script(Raw(body))
    told = plain(granted)
    assert told["status"] == 200 and told["whole"]
    assert "4f1d9c" not in told["text"] and "it is ***" in told["text"]
    assert granted.money()["charged_micros"] == 3


def test_who_sends_nonsense_for_a_token_or_too_many_values_is_told(granted, upstream):
    assert plain(granted, token="sgm_nonsense")["status"] == 401
    many = {"model": "large", "max_tokens": 1, "messages": [[] for _ in range(1000)]}
    deep = {"model": "large", "max_tokens": 1, "messages": json.loads("[" * 80 + "]" * 80)}
    assert plain(granted, deep)["status"] == 400
    upstream.script(Turn("hi"))
    assert plain(granted, many)["status"] == 200, "a thousand are no matter"
