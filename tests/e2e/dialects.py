"""What providers of models say: one turn, in each of the protocols that they speak, as a whole and as a stream.

Checked against the clients that providers publish (test_upstream.py), so that what agrees with this agrees with them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass

# Route, and the name that its protocol has here.
ROUTES = {
    "/v1/messages": "messages",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/images/generations": "images",
}

# The smallest picture there is: one transparent point.
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True)
class Use:
    """A tool that the model wants to be used."""

    name: str
    input: dict


@dataclass(frozen=True)
class Usage:
    """Tokens, each counted once: `input` came from no cache and went into none."""

    input: int = 100
    output: int = 20
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0

    @property
    def read(self) -> int:
        return self.input + self.cache_read + self.cache_write


@dataclass(frozen=True)
class Turn:
    """What the model says, and what goes wrong while it says it."""

    text: str = ""
    uses: tuple[Use, ...] = ()
    # None is never said, as some providers do.
    usage: Usage | None = Usage()
    # `max_tokens` where the answer has its end because it got too long.
    stop: str | None = None
    # How many events a text comes in.
    pieces: int = 3
    # Seconds before the first byte, and between two events.
    before: float = 0
    pause: float = 0
    # After so many events (of an answer that is no stream: half of its bytes) the connection ends, …
    cut: int | None = None
    # … nothing more comes although it stays open, …
    hang: int | None = None
    # … or an error comes, and the end.
    fail: int | None = None

    @property
    def why(self) -> str:
        return self.stop or ("tool_use" if self.uses else "end_turn")


@dataclass(frozen=True)
class Picture:
    """What a model of images makes."""

    usage: Usage | None = Usage(input=12, output=1056)


def sse(data: dict | str, event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def cut_up(text: str, pieces: int) -> list[str]:
    size = max(1, -(-len(text) // max(1, pieces)))
    return [text[at : at + size] for at in range(0, len(text), size)]


# --- Anthropic Messages ----------------------------------------------------------------------------------


def messages_usage(usage: Usage, output: int | None = None) -> dict:
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output if output is None else output,
    }


def messages_blocks(turn: Turn, number: int) -> list[dict]:
    text = [{"type": "text", "text": turn.text}] if turn.text else []
    uses = [
        {"type": "tool_use", "id": f"toolu_{number:06}{at}", "name": use.name, "input": use.input}
        for at, use in enumerate(turn.uses)
    ]
    return text + uses


def messages_whole(turn: Turn, model: str, number: int) -> dict:
    whole = {
        "id": f"msg_{number:06}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": messages_blocks(turn, number),
        "stop_reason": turn.why,
        "stop_sequence": None,
    }
    return whole | ({"usage": messages_usage(turn.usage)} if turn.usage else {})


def messages_events(turn: Turn, model: str, number: int) -> Iterator[bytes]:
    start = messages_whole(turn, model, number) | {"content": [], "stop_reason": None}
    if turn.usage:
        start["usage"] = messages_usage(turn.usage, output=1)
    yield sse({"type": "message_start", "message": start}, "message_start")
    yield sse({"type": "ping"}, "ping")
    for index, block in enumerate(messages_blocks(turn, number)):
        if block["type"] == "text":
            empty = block | {"text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in cut_up(block["text"], turn.pieces)]
        else:
            empty = block | {"input": {}}
            pieces = cut_up(json.dumps(block["input"]), 2)
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ["", *pieces]]
        said = {"type": "content_block_start", "index": index, "content_block": empty}
        yield sse(said, "content_block_start")
        for delta in deltas:
            yield sse({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield sse({"type": "content_block_stop", "index": index}, "content_block_stop")
    end = {"type": "message_delta", "delta": {"stop_reason": turn.why, "stop_sequence": None}}
    # It is the sum of all, and told again in every such event.
    yield sse(end | ({"usage": messages_usage(turn.usage)} if turn.usage else {"usage": {}}), "message_delta")
    yield sse({"type": "message_stop"}, "message_stop")


# --- OpenAI Chat Completions -----------------------------------------------------------------------------

CHAT_STOPS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "refusal": "content_filter"}


def chat_usage(usage: Usage) -> dict:
    return {
        "prompt_tokens": usage.read,
        "completion_tokens": usage.output,
        "total_tokens": usage.read + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def chat_calls(turn: Turn, number: int) -> list[dict]:
    return [
        {
            "id": f"call_{number:06}{at}",
            "type": "function",
            "function": {"name": use.name, "arguments": json.dumps(use.input)},
        }
        for at, use in enumerate(turn.uses)
    ]


def chat_head(kind: str, model: str, number: int) -> dict:
    return {"id": f"chatcmpl-{number:06}", "object": kind, "created": 1764500000, "model": model}


def chat_whole(turn: Turn, model: str, number: int) -> dict:
    message = {"role": "assistant", "content": turn.text or None, "refusal": None}
    if turn.uses:
        message["tool_calls"] = chat_calls(turn, number)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": CHAT_STOPS[turn.why]}
    whole = chat_head("chat.completion", model, number) | {"choices": [choice]}
    return whole | ({"usage": chat_usage(turn.usage)} if turn.usage else {})


def chat_events(turn: Turn, model: str, number: int, wants_usage: bool) -> Iterator[bytes]:
    head = chat_head("chat.completion.chunk", model, number)

    def chunk(delta: dict, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse(head | {"choices": [choice]} | ({"usage": None} if wants_usage else {}))

    yield chunk({"role": "assistant", "content": ""})
    for piece in cut_up(turn.text, turn.pieces):
        yield chunk({"content": piece})
    for index, call in enumerate(chat_calls(turn, number)):
        started = call | {"function": call["function"] | {"arguments": ""}}
        yield chunk({"tool_calls": [{"index": index} | started]})
        for piece in cut_up(call["function"]["arguments"], 2):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, CHAT_STOPS[turn.why])
    if wants_usage and turn.usage:
        yield sse(head | {"choices": [], "usage": chat_usage(turn.usage)})
    yield sse("[DONE]")


# --- OpenAI Responses ------------------------------------------------------------------------------------


def responses_usage(usage: Usage) -> dict:
    return {
        "input_tokens": usage.read,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.read + usage.output,
    }


def responses_items(turn: Turn, number: int) -> list[dict]:
    items: list[dict] = []
    if turn.text:
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"item_{number:06}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    for at, use in enumerate(turn.uses):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{number:06}{at}",
                "call_id": f"call_{number:06}{at}",
                "name": use.name,
                "arguments": json.dumps(use.input),
                "status": "completed",
            }
        )
    return items


def responses_whole(turn: Turn, model: str, number: int) -> dict:
    cut_short = turn.why == "max_tokens"
    return {
        "id": f"resp_{number:06}",
        "object": "response",
        "created_at": 1764500000,
        "status": "incomplete" if cut_short else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": responses_items(turn, number),
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": responses_usage(turn.usage) if turn.usage else None,
    }


def responses_events(turn: Turn, model: str, number: int) -> Iterator[bytes]:
    whole = responses_whole(turn, model, number)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    sequence = iter(range(1 << 30))

    def event(kind: str, **more) -> bytes:
        return sse({"type": kind, "sequence_number": next(sequence)} | more, kind)

    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield event("response.output_item.added", output_index=index, item=item | {"status": "in_progress"} | empty)
        if item["type"] == "message":
            part = item["content"][0]
            at["content_index"] = 0
            yield event("response.content_part.added", **at, part=part | {"text": ""})
            for piece in cut_up(part["text"], turn.pieces):
                yield event("response.output_text.delta", **at, delta=piece, logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        else:
            for piece in cut_up(item["arguments"], 2):
                yield event("response.function_call_arguments.delta", **at, delta=piece)
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **at, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


# --- images, and what goes wrong -------------------------------------------------------------------------


def image_whole(picture: Picture) -> dict:
    usage = picture.usage
    told = usage and {
        "input_tokens": usage.read,
        "input_tokens_details": {"text_tokens": usage.read, "image_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"text_tokens": 0, "image_tokens": usage.output},
        "total_tokens": usage.read + usage.output,
    }
    whole = {"created": 1764500000, "data": [{"b64_json": base64.b64encode(PIXEL).decode()}]}
    return whole | ({"usage": told} if told else {})


def error_body(dialect: str, kind: str, message: str) -> dict:
    if dialect == "messages":
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "code": kind, "param": None}}


def error_event(dialect: str) -> bytes:
    """An error in the middle of a stream."""
    message = "the provider broke off"
    if dialect == "messages":
        return sse(error_body(dialect, "overloaded_error", message), "error")
    if dialect == "chat":
        return sse(error_body(dialect, "server_error", message))
    error = {"code": "server_error", "message": message}
    failed = responses_whole(Turn(usage=None), "model", 0) | {"status": "failed", "error": error}
    return sse({"type": "response.failed", "sequence_number": 1 << 20, "response": failed}, "response.failed")


def whole_of(turn: Turn, dialect: str, model: str, number: int) -> dict:
    made = {"messages": messages_whole, "chat": chat_whole, "responses": responses_whole}
    return made[dialect](turn, model, number)


def events_of(turn: Turn, dialect: str, model: str, number: int, body: dict) -> Iterator[bytes]:
    if dialect == "chat":
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return chat_events(turn, model, number, wants_usage)
    made = {"messages": messages_events, "responses": responses_events}
    return made[dialect](turn, model, number)
