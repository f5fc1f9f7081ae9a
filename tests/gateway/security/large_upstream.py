"""An OpenAI-compatible server whose answers are large, in a process of its own so that its work is not
measured with the gateway's. The prompt's first word names the answer; the port is printed.

    python -m tests.gateway.security.large_upstream
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

PROSE = "The road was long and the toll was small, so the carter paid and went on. "
USAGE = {"prompt_tokens": 7, "completion_tokens": 50, "total_tokens": 57}
TEXT = PROSE * 5_000  # 375 kB
VECTORS, WIDTH = 600, 1536


def _whole(text: str, *, usage: bool = True, **message: Any) -> bytes:
    choice = {"index": 0, "message": {"content": text, **message}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], **({"usage": USAGE} if usage else {})}).encode()


def _event(reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def _end() -> bytes:
    usage = json.dumps({"choices": [], "usage": USAGE}).encode()
    return _event("stop", content="") + b"data: " + usage + b"\n\ndata: [DONE]\n\n"


def _call(arguments: str, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "function": {"arguments": arguments}, **fields}


def _logprobs() -> bytes:
    words = PROSE.replace(" ", " \x00").split("\x00")[:-1] * 1_500
    listed = [{"token": word, "logprob": -0.5, "bytes": list(word.encode())} for word in words]
    choice = {
        "index": 0,
        "message": {"content": "".join(words)},
        "logprobs": {"content": listed},
        "finish_reason": "stop",
    }
    return json.dumps({"choices": [choice], "usage": USAGE}).encode()


def _embeddings() -> bytes:
    row = json.dumps([(-1) ** n * (n + 0.123456789) / WIDTH for n in range(WIDTH)])
    rows = [f'{{"object":"embedding","index":{n},"embedding":{row}}}' for n in range(VECTORS)]
    return f'{{"data":[{",".join(rows)}],"usage":{json.dumps(USAGE)}}}'.encode()


def _many_events() -> bytes:
    return b"".join([_event(content=PROSE) for _ in range(4_000)]) + _end()


def _arguments() -> bytes:
    first = _call('{"text": "', id="c1", function={"name": "note", "arguments": '{"text": "'})
    pieces = [_event(tool_calls=[_call(PROSE)]) for _ in range(4_000)]
    last = _event(tool_calls=[_call('"}')]) + _event("tool_calls")
    return _event(tool_calls=[first]) + b"".join(pieces) + last + b"data: [DONE]\n\n"


STREAMS: dict[str, Callable[[], bytes]] = {
    "events": _many_events,
    "arguments": _arguments,
    "delta": lambda: _event(content=TEXT) + _end(),
    "uncounted": lambda: _event(content=TEXT) + _event("stop", content="") + b"data: [DONE]\n\n",
    "endless": lambda: b"data: " + b"x" * 12_000_000,
}
WHOLE: dict[str, Callable[[], bytes]] = {
    "text": lambda: _whole(TEXT),
    "unmeasured": lambda: _whole(TEXT, usage=False),
    "logprobs": _logprobs,
    "call": lambda: _whole(
        "",
        tool_calls=[
            {"id": "c1", "function": {"name": "note", "arguments": json.dumps({"text": TEXT})}}
        ],
    ),
}


def _pieces(body: bytes) -> Iterator[bytes]:
    """Of several sizes, none of which ends where a line does."""
    at, size = 0, 1
    while at < len(body):
        yield body[at : at + size]
        at, size = at + size, min(65_537, size * 4 + 1)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    made: dict[str, bytes] = {}
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            body = json.loads(
                await reader.readexactly(int(fields.get(b"content-length", 0))) or b"{}"
            )
            path = head.split(b" ")[1].decode()
            kind, raw = "application/json", b'{"object":"list","data":[]}'
            if path == "/v1/completions":
                choice = {"index": 0, "text": "Hello.", "finish_reason": "stop"}
                raw = json.dumps({"choices": [choice], "usage": USAGE}).encode()
            elif path == "/v1/embeddings":
                raw = made.setdefault(path, _embeddings())
            elif path == "/v1/chat/completions":
                word = str(body["messages"][-1]["content"]).split()[0]
                known = STREAMS if word in STREAMS else WHOLE
                kind = "text/event-stream" if word in STREAMS else kind
                raw = made.setdefault(word, known.get(word, lambda: _whole("Hello."))())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind.encode())
            writer.write(b"content-length: %d\r\n\r\n" % len(raw))
            for piece in _pieces(raw):
                writer.write(piece)
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=1 << 26)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
