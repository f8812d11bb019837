"""The scripted provider is one that the providers' own clients accept, and does wrong what it was told to do wrong."""

import base64
import json
import ssl
import threading
import time

import anthropic
import httpx
import openai
import pytest
from dialects import PIXEL
from support import until
from upstream import GARBAGE, HALF, Gone, Picture, Raw, Status, Turn, Upstream, Usage, Use

USAGE = Usage(input=70, output=9, cache_read=20, cache_write=10, reasoning=4)
USE = Use("shell", {"command": "echo 'hello, \"wörld\"'"})
SPOKEN = Turn("one two three, and four", (USE,), USAGE)
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}


def claude(upstream) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=upstream.url, api_key="sgm_key", max_retries=0)


def gpt(upstream) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{upstream.url}/v1", api_key="sgm_key", max_retries=0)


def ask_claude(upstream, stream: bool):
    more = {
        "model": "m",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "shell", "input_schema": TOOL}],
    }
    if not stream:
        return claude(upstream).messages.create(**more)
    with claude(upstream).messages.stream(**more) as said:
        return said.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_messages_understands_it(upstream, stream):
    upstream.script(SPOKEN)
    said = ask_claude(upstream, stream)
    text, use = said.content
    assert (text.text, use.name, use.input) == (SPOKEN.text, USE.name, USE.input)
    assert said.stop_reason == "tool_use"
    told = said.usage
    assert (told.input_tokens, told.cache_read_input_tokens, told.cache_creation_input_tokens) == (70, 20, 10)
    assert told.output_tokens == 9
    [asked] = upstream.asked
    assert (asked.dialect, asked.key, asked.prompts(), asked.tools()) == ("messages", "sgm_key", ["hi"], ["shell"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_chat_completions_understands_it(upstream, stream):
    upstream.script(SPOKEN)
    more = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "shell", "parameters": TOOL}}],
    }
    chat = gpt(upstream).chat.completions
    if stream:
        with chat.stream(**more, stream_options={"include_usage": True}) as events:
            said = events.get_final_completion()
    else:
        said = chat.create(**more)
    message = said.choices[0].message
    assert (message.content, said.choices[0].finish_reason) == (SPOKEN.text, "tool_calls")
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (USE.name, USE.input)
    assert (said.usage.prompt_tokens, said.usage.prompt_tokens_details.cached_tokens) == (100, 20)
    assert (said.usage.completion_tokens, said.usage.completion_tokens_details.reasoning_tokens) == (9, 4)
    [asked] = upstream.asked
    assert (asked.dialect, asked.key, asked.prompts(), asked.tools()) == ("chat", "sgm_key", ["hi"], ["shell"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_responses_understands_it(upstream, stream):
    upstream.script(SPOKEN)
    more = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "shell", "parameters": TOOL}]}
    responses = gpt(upstream).responses
    if stream:
        with responses.stream(**more) as events:
            said = events.get_final_response()
    else:
        said = responses.create(**more)
    assert (said.output_text, said.status) == (SPOKEN.text, "completed")
    call = said.output[1]
    assert (call.name, json.loads(call.arguments)) == (USE.name, USE.input)
    assert (said.usage.input_tokens, said.usage.input_tokens_details.cached_tokens) == (100, 20)
    assert (said.usage.output_tokens, said.usage.output_tokens_details.reasoning_tokens) == (9, 4)
    [asked] = upstream.asked
    assert (asked.dialect, asked.prompts(), asked.tools()) == ("responses", ["hi"], ["shell"])


def test_pictures_are_made(upstream):
    upstream.script(Picture(Usage(input=5, output=1056)))
    said = gpt(upstream).images.generate(model="m", prompt="a cat")
    assert base64.b64decode(said.data[0].b64_json) == PIXEL
    assert (said.usage.input_tokens, said.usage.output_tokens) == (5, 1056)
    assert upstream.asked[0].prompts() == ["a cat"]


def test_a_turn_may_depend_on_what_tools_said(upstream):
    upstream.script(Turn(uses=(USE,)), lambda asked: Turn(f"got {asked.results()}"))
    first = ask_claude(upstream, stream=False)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": first.content[0].id, "content": "42"}]},
    ]
    said = claude(upstream).messages.create(model="m", max_tokens=9, messages=history)
    assert said.content[0].text == "got ['42']"
    history = [
        {"role": "user", "content": "hi"},
        {"role": "tool", "tool_call_id": "call_1", "content": "43"},
    ]
    upstream.script(lambda asked: Turn(f"got {asked.results()}"))
    said = gpt(upstream).chat.completions.create(model="m", messages=history)
    assert said.choices[0].message.content == "got ['43']"
    upstream.script(lambda asked: Turn(f"got {asked.results()}"))
    history = [{"type": "function_call_output", "call_id": "call_1", "output": "44"}]
    assert gpt(upstream).responses.create(model="m", input=history).output_text == "got ['44']"


def test_it_is_there_with_tls(work_folder):
    folder = work_folder / "provider"
    folder.mkdir()
    upstream = Upstream(folder)
    try:
        upstream.script(Turn("safe"), Turn("slow", before=0.2, pause=0.01))
        body = {"model": "m", "messages": []}
        url = f"{upstream.url}/v1/chat/completions"
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, json=body)
        with httpx.Client(verify=ssl.create_default_context(cafile=upstream.authority)) as client:
            said = client.post(url, json=body).json()
            assert said["choices"][0]["message"]["content"] == "safe"
            assert "data: [DONE]" in client.post(url, json=body | {"stream": True}).text
    finally:
        upstream.close()


# --- what goes wrong -------------------------------------------------------------------------------------


def test_refusals_are_those_of_the_protocol(upstream):
    upstream.always(Status(429, "rate_limit_error", retry_after=7))
    with pytest.raises(anthropic.RateLimitError) as refused:
        ask_claude(upstream, stream=True)
    assert refused.value.response.headers["retry-after"] == "7"
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.RateLimitError) as refused:
        gpt(upstream).responses.create(model="m", input="hi")
    assert refused.value.code == "rate_limit_error"
    upstream.always(Status(529, "overloaded_error"))
    with pytest.raises(anthropic.APIStatusError) as refused:
        ask_claude(upstream, stream=False)
    assert refused.value.status_code == 529


@pytest.mark.parametrize("dialect", ["messages", "chat", "responses"])
def test_a_stream_ends_in_the_middle_or_stands_still_or_fails(upstream, dialect):
    path = {"messages": "messages", "chat": "chat/completions", "responses": "responses"}[dialect]
    url = f"{upstream.url}/v1/{path}"
    body = {"model": "m", "stream": True, "messages": [], "input": "x"}
    upstream.script(Turn("a b c d", cut=3), Turn("a b c d", hang=3), Turn("a b c d", fail=3), Turn("a b c d"))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(url, json=body)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.5)
    hung = upstream.asked[1]
    assert hung.done.wait(5) and hung.left
    assert "the provider broke off" in httpx.post(url, json=body).text
    whole = httpx.post(url, json=body).text
    assert "the provider broke off" not in whole and not upstream.asked[3].left
    upstream.script(Turn("a b c d", cut=0), Gone())
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(url, json=body | {"stream": False})


def test_nothing_may_be_said_of_usage(upstream):
    upstream.always(Turn("text", usage=None))
    for stream in (False, True):
        chat = httpx.post(
            f"{upstream.url}/v1/chat/completions",
            json={"model": "m", "messages": [], "stream": stream, "stream_options": {"include_usage": True}},
        )
        assert "prompt_tokens" not in chat.text
        for path in ("messages", "responses"):
            body = {"model": "m", "messages": [], "input": "x", "stream": stream}
            assert "input_tokens" not in httpx.post(f"{upstream.url}/v1/{path}", json=body).text


def test_what_is_no_answer_is_none(upstream):
    upstream.script(HALF, GARBAGE, Raw(b"<html>", "text/html", 502))
    with pytest.raises(json.JSONDecodeError):
        ask_claude(upstream, stream=False)
    garbage = httpx.post(f"{upstream.url}/v1/responses", json={"model": "m", "stream": True})
    assert garbage.content == GARBAGE.body
    assert httpx.post(f"{upstream.url}/v1/responses", json={"model": "m"}).status_code == 502


def test_it_takes_its_time(upstream):
    upstream.script(Turn("a b c", before=0.3, pause=0.1))
    with httpx.stream("POST", f"{upstream.url}/v1/messages", json={"model": "m", "stream": True}) as said:
        at = [time.monotonic() for _ in said.iter_raw()]
    assert at[0] - upstream.asked[0].at >= 0.3
    assert at[-1] - at[0] >= 0.5


def test_an_answer_may_be_huge(upstream):
    upstream.script(Turn("x" * (8 << 20), pieces=1), Turn("x" * (8 << 20), pieces=1000))
    assert len(ask_claude(upstream, stream=False).content[0].text) == 8 << 20
    assert len(httpx.post(f"{upstream.url}/v1/messages", json={"model": "m", "stream": True}).content) > 8 << 20


def test_many_ask_at_once(upstream):
    upstream.always(Turn("all of you", before=0.3))
    said = []

    def ask():
        said.append(httpx.post(f"{upstream.url}/v1/messages", json={"model": "m"}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [200] * 64
    assert until(lambda: all(asked.done.is_set() for asked in upstream.asked))


def test_what_nothing_was_written_down_for_is_seen():
    upstream = Upstream()
    try:
        assert httpx.post(f"{upstream.url}/v1/messages", json={"model": "m"}).status_code == 500
        assert [asked.path for asked in upstream.unexpected] == ["/v1/messages"]
        assert httpx.get(f"{upstream.url}/v1/models").status_code == 404
        assert len(upstream.unexpected) == 1
    finally:
        upstream.close()
