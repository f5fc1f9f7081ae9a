"""An OpenAI-compatible server whose answers cut, merge, delay and misreport what a prompt tells it to.

The plan stands in the request's last text as `name=value` words, so that one process serves any
number of requests that end in different ways:

    python -m tests.gateway.scripted_upstream      prints its port
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

PROMPT = 7  # tokens that an honest report says the prompt has
PER_WORD = 3  # and each word of the answer
WORD = "gate "
# stop: whole and correct. undone: no `[DONE]`, the body just ends. cut: the connection is reset.
# error: an error event after the words. garbage: an event that is not JSON. silent: nothing more.
# body: status 200 with an error for a body. none: no choices. failed: a finish reason that is an error.
# The others are refusals before the answer.
ENDINGS = ("stop", "length", "undone", "cut", "error", "garbage", "silent")
UNUSUAL = ("body", "none", "failed")
REFUSALS = {"refused": 400, "busy": 429, "down": 500, "gone": 404}
# none; late: an event of its own; last: with the last choice; every: on all events; then those that
# are wrong: too small, too large, nothing, negative, not a number, not an object, before the text.
REPORTS = (
    "none",
    "late",
    "last",
    "every",
    "one",
    "huge",
    "zero",
    "negative",
    "text",
    "list",
    "early",
)


@dataclass(frozen=True, slots=True)
class Plan:
    words: int = 4
    merge: int = 1  # words that one event carries
    piece: int = 0  # bytes that one write carries; 0: an event
    delay_ms: int = 0  # before each write
    report: str = "late"
    ending: str = "stop"

    def __str__(self) -> str:
        return " ".join(f"{each.name}={getattr(self, each.name)}" for each in fields(self))

    @property
    def tokens(self) -> int:
        """What an honest report says of the answer."""
        return self.words * PER_WORD


def plan_of(text: str) -> Plan:
    given = dict(re.findall(r"(\w+)=(\w+)", text))
    known = {each.name: type(each.default) for each in fields(Plan)}
    return Plan(**{name: known[name](value) for name, value in given.items() if name in known})


def usage_of(plan: Plan, tokens: int) -> Any:
    wrong: dict[str, Any] = {"one": 1, "huge": 10**6, "zero": 0, "negative": -5, "text": "9"}
    if plan.report == "list":
        return [tokens]
    counted = wrong.get(plan.report, tokens)
    return {"prompt_tokens": PROMPT, "completion_tokens": counted, "total_tokens": PROMPT + tokens}


def whole(plan: Plan, path: str) -> bytes:
    if plan.ending == "body":
        return json.dumps({"error": {"message": "it broke", "code": "broken"}}).encode()
    if plan.ending == "none":
        return json.dumps({"choices": [], "usage": usage_of(plan, 0)}).encode()
    text = WORD * plan.words
    choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(plan)}
    choice |= {"message": {"content": text}} if "chat" in path else {"text": text}
    answer: dict[str, Any] = {"choices": [choice]}
    if plan.report != "none":
        answer["usage"] = usage_of(plan, plan.tokens)
    return json.dumps(answer).encode()


def vectors(plan: Plan, count: int) -> bytes:
    rows = [{"index": number, "embedding": [0.5, -0.5]} for number in range(count)]
    reported = {} if plan.report == "none" else {"usage": usage_of(plan, 0)}
    return json.dumps({"data": rows, **reported}).encode()


def events(plan: Plan, path: str) -> Iterator[bytes]:
    """The stream's events up to its ending."""
    sent = 0
    if plan.ending == "body":
        yield _event({"error": {"message": "it broke", "code": "broken"}})
    if plan.ending == "none":
        yield b"data: [DONE]\n\n"
    if plan.ending in ("body", "none"):
        return
    if plan.report == "early":
        yield _event({"choices": [], "usage": usage_of(plan, 0)})
    while sent < plan.words:
        step = min(plan.merge, plan.words - sent)
        sent += step
        event: dict[str, Any] = {"choices": [_choice(path, WORD * step)]}
        if plan.report == "every":
            event["usage"] = usage_of(plan, sent * PER_WORD)
        yield _event(event)
    if plan.ending not in ("stop", "length", "failed"):
        return
    last: dict[str, Any] = {"choices": [_choice(path, "", _reason(plan))]}
    if plan.report in ("last", "every"):
        last["usage"] = usage_of(plan, plan.tokens)
    yield _event(last)
    if plan.report not in ("none", "last", "every", "early"):
        yield _event({"choices": [], "usage": usage_of(plan, plan.tokens)})
    yield b"data: [DONE]\n\n"


def _choice(path: str, text: str, reason: str | None = None) -> dict[str, Any]:
    body = {"delta": {"content": text}} if "chat" in path else {"text": text}
    return {"index": 0, **body, "finish_reason": reason}


def _event(fields_: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields_).encode() + b"\n\n"


def _reason(plan: Plan) -> str:
    return {"length": "length", "failed": "error"}.get(plan.ending, "stop")


def _text_of(body: dict[str, Any]) -> str:
    found = body.get("input") or body.get("prompt") or body["messages"][-1]["content"]
    while isinstance(found, list):
        found = found[-1]
    return str(found.get("text") if isinstance(found, dict) else found)


class ScriptedUpstream:
    """Serves on a free port of this machine; `asked` counts the requests that came."""

    def __init__(self) -> None:
        self.asked = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = json.loads(
                    await reader.readexactly(int(length[1]) if length else 0) or b"{}"
                )
                path = head.split(b" ", 2)[1].decode()
                if not body:
                    await _send(writer, 200, b'{"object":"list","data":[]}')
                elif not await self._answer(reader, writer, path, body):
                    break
        self._open.discard(writer)
        writer.close()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: dict[str, Any],
    ) -> bool:
        """Whether the connection can take another request."""
        self.asked += 1
        plan = plan_of(_text_of(body))
        if plan.ending in REFUSALS:
            error = {"error": {"message": "no", "type": "t", "code": plan.ending}}
            await _send(writer, REFUSALS[plan.ending], json.dumps(error).encode())
            return True
        if "embeddings" in path:
            given = body["input"]
            answer = vectors(plan, len(given) if isinstance(given, list) else 1)
            if plan.ending in UNUSUAL:
                answer = whole(plan, path)
            return await self._whole(reader, writer, plan, answer)
        if not body.get("stream"):
            return await self._whole(reader, writer, plan, whole(plan, path))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for event in events(plan, path):
            for start in range(0, len(event), plan.piece or len(event)):
                await _pause(plan)
                _chunk(writer, event[start : start + (plan.piece or len(event))])
            await writer.drain()
        return await self._end(reader, writer, plan)

    async def _end(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, plan: Plan
    ) -> bool:
        if plan.ending == "error":
            _chunk(writer, _event({"error": {"message": "it broke", "code": "broken"}}))
        elif plan.ending == "garbage":
            _chunk(writer, b'data: {"choices": [{]}\n\n')
        elif plan.ending == "silent":
            await writer.drain()
            await reader.read(1)  # until the client leaves
            return False
        elif plan.ending == "cut":
            await writer.drain()
            await asyncio.sleep(0.002)  # what was written arrives before the reset
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _whole(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        plan: Plan,
        answer: bytes,
    ) -> bool:
        await _pause(plan)
        if plan.ending == "error":
            await _send(writer, 500, b'{"error":{"message":"it broke","code":"broken"}}')
            return True
        if plan.ending == "garbage":
            await _send(writer, 200, answer[:-2])
            return True
        if plan.ending == "silent":
            await reader.read(1)
            return False
        if plan.ending == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(answer))
            writer.write(answer[: len(answer) // 2])
            await writer.drain()
            await asyncio.sleep(0.002)
            writer.transport.abort()
            return False
        await _send(writer, 200, answer)
        return True


async def _pause(plan: Plan) -> None:
    if plan.delay_ms or plan.piece:
        await asyncio.sleep(plan.delay_ms / 1000)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\n" % status)
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()


async def _main() -> None:
    upstream = ScriptedUpstream()
    url = await upstream.start()
    sys.stdout.write(url.rsplit(":", 1)[1] + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_main())
