#!/usr/bin/python3
"""An agent that has turned against its server.

It is process 1 of its sandbox; its standard input and output are the session. What it does before its hello is written
into it; what it does then, the test asks for by the environment of the sandbox that it is configured with.
"""

import json
import os
import struct
import sys
import zlib

BEFORE_HELLO = "@BEFORE@"

MAGIC = b"\xf5SG\x1e"
ATTACH, CONTROL, OPEN, OPENED, DATA, FIN, RESET, WINDOW, PING, PONG = range(1, 11)
MAX_PAYLOAD = 64 * 1024
MAX_CONTROL = 128 * 1024


def say(data):
    while data:
        data = data[os.write(1, data) :]


def frame(kind, flow=0, payload=b"", flags=0, epoch=None, length=None, crc=None):
    """One frame; each field may be a lie."""
    head = MAGIC + (EPOCH if epoch is None else epoch) + bytes([kind, flags, 0, 0])
    head += struct.pack("<II", flow, len(payload) if length is None else length)
    head += struct.pack("<I", zlib.crc32(payload) if crc is None else crc)
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def control(message):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    parts = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)] or [b""]
    return b"".join(frame(CONTROL, payload=part, flags=part is not parts[-1]) for part in parts)


def frames():
    """What the server says, each as (kind, flow, flags, payload). The epoch is that of its attachment."""
    global EPOCH
    received = b""
    while True:
        at = received.find(MAGIC)
        received = received[at:] if at >= 0 else received[-3:]
        if len(received) >= 32 and at >= 0:
            kind, flags = received[12], received[13]
            flow, length = struct.unpack("<II", received[16:24])
            if len(received) >= 32 + length:
                if kind == ATTACH:
                    EPOCH = received[4:12]
                yield kind, flow, flags, received[32 : 32 + length]
                received = received[32 + length :]
                continue
        more = os.read(0, 1 << 20)
        if not more:
            return
        received += more


def hello(**lies):
    return control({"type": "hello", "revision": 1, "agent_version": "0", "generation": 0} | lies)


def noise():
    """Everything that breaks a rule and is about nothing that exists."""
    yield os.urandom(100_000)
    yield MAGIC * 10_000
    for length in [MAX_PAYLOAD + 1, 0x7FFFFFFF, 0xFFFFFFFF]:
        yield frame(DATA, 1, length=length)
    yield frame(CONTROL, payload=b"x" * 1000, crc=0)
    yield frame(CONTROL, payload=b'{"type":"configured","generation":1}', epoch=b"\1" * 8)
    for kind in range(256):
        yield frame(kind, 0xFFFFFFFF, b"\xff" * 8) if kind != CONTROL else b""
    for flow in range(5000):
        yield frame(OPEN, flow, b"\1") + frame(OPENED, flow)
        yield frame(DATA, flow, b"unasked") + frame(WINDOW, flow, b"\xff" * 4)
    for message in [b"", b"{", b"[]", b"null", b'{"type":"unknown"}', b"\xff" * MAX_CONTROL, b"[" * MAX_CONTROL]:
        yield control(message)
    # One that never ends, as long as it is not ended.
    yield frame(CONTROL, payload=b"z" * MAX_PAYLOAD, flags=1) * 100 + frame(CONTROL)


def forever(data):
    while True:
        say(data)


def configured(play, generation):
    """Answers the configuration as the play has it."""
    good = control({"type": "configured", "generation": generation})
    if play == "wrong generation":
        say(control({"type": "configured", "generation": generation + 1}))
    elif play == "generation too large":
        say(control(b'{"type":"configured","generation":99999999999999999999}') * 100 + hello())
    elif play == "hello twice":
        say(hello())
    elif play == "refused":
        say(control({"type": "configure_failed", "reason": "\x1b[31mforged\n" + "r" * 100_000}))
    elif play == "silent":
        pass
    elif play == "quits":
        os._exit(3)
    elif play == "kills its engine":
        os.kill(1, 11)
        os._exit(4)
    elif play == "notices":
        forever(control({"type": "notice", "message": "\x1b[31mforged line\n" * 4000}))
    elif play == "floods":
        forever(frame(DATA, 1, b"f" * MAX_PAYLOAD) + control(b" " * MAX_CONTROL) + frame(PING, 0, b"12345678"))
    else:
        for part in noise():
            say(part)
        say(good)


def opens(play, flow, turn):
    """What the play does with a flow that the server opens."""
    if play == "resets":
        say(frame(RESET, flow, b"\1\0\0\0"))
    elif play != "never opens":
        say(frame(OPENED, flow))
        if play == "answers before it is asked":
            answer(play, flow, turn)
        else:
            asked[flow] = b""


# Flows whose request has not come as a whole, and what there is of it.
asked = {}


def answer(play, flow, turn):
    """What the play does with a request."""
    body = b"turn %d" % turn
    honest = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    # Nothing more than the window may be sent before the server grants it: so much is received for certain.
    first = {
        "garbage": b"\xff" * 1000,
        "endless head": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 60_000,
        "endless line": b"H" * 65_000,
        "many headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 10_000,
        "endless 100": b"HTTP/1.1 100 Continue\r\n\r\n" * 2000,
        "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        "switches": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n" + b"x" * 1000,
        "truncated": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nonly this",
        "smuggled": honest + b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsmuggled",
        "endless body": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "closes": b"",
        "more than the window": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    }
    if play == "opens twice":
        say(frame(OPENED, flow) * 1000 + frame(WINDOW, flow, b"\xff" * 4) * 1000)
        say(frame(DATA, flow, honest) + frame(FIN, flow) * 3)
    elif play == "more than the window":
        say(frame(DATA, flow, first[play]) + frame(DATA, flow, b"1000\r\n" + b"x" * 60_000) * 20)
    elif play == "endless body":
        say(frame(DATA, flow, first[play]))
        bodies[flow] = MAX_PAYLOAD - len(first[play])
        go_on(flow, play)
    elif play in ("endless head", "endless line"):
        say(frame(DATA, flow, first[play]))
        bodies[flow] = 0
    else:
        say(frame(DATA, flow, first.get(play, honest)) + frame(FIN, flow))


# Flows with a body that goes on, and how much the server may still be sent on each.
bodies = {}


def go_on(flow, play):
    """Sends what the window allows."""
    chunk = b"3f00\r\n" + b"b" * 0x3F00 + b"\r\n" if play == "endless body" else b"y" * 0x3F00
    while bodies[flow] >= len(chunk):
        bodies[flow] -= len(chunk)
        say(frame(DATA, flow, chunk))


def main():
    if BEFORE_HELLO == "quits":
        os._exit(7)
    play, turn, message = None, 0, b""
    for kind, flow, flags, payload in frames():
        if kind == ATTACH:
            if BEFORE_HELLO == "mute":
                continue
            if BEFORE_HELLO == "floods":
                forever(b"".join(noise()))
            if BEFORE_HELLO == "revision":
                say(hello(revision=0xFFFFFFFF, agent_version="\x1b[31m" + "v" * 100_000))
                continue
            for part in noise():
                say(part)
            say(hello())
        elif kind == CONTROL:
            message += payload
            if not flags & 1:
                order, message = json.loads(message), b""
                play = order.get("env", {}).get("PLAY", "")
                configured(play, order["generation"])
        elif kind == PING:
            say(frame(PONG, 0, payload))
        elif kind == OPEN:
            opens(play, flow, turn + 1)
        elif kind == DATA and flow in asked:
            asked[flow] += payload
            if b"\r\n\r\n" in asked[flow]:
                del asked[flow]
                turn += 1
                answer(play, flow, turn)
        elif kind == WINDOW and flow in bodies:
            bodies[flow] += struct.unpack("<I", payload[:4])[0]
            go_on(flow, play)
        elif kind == RESET:
            bodies.pop(flow, None)
            asked.pop(flow, None)


EPOCH = b"\1" * 8
try:
    main()
except Exception as error:
    # The engine's log; without it a mistake in here would look like a hostile act.
    print(repr(error), file=sys.stderr)
    os._exit(99)
