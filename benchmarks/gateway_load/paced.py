"""Streams whose chunks arrive one by one, as an engine that generates sends them.

The static upstream sends a whole stream at once, so its chunks are joined. Here each comes alone: the
CPU time of a chunk is that of a whole pass through the gateway.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gateway_load.costs import cpu_s
from benchmarks.gateway_load.load import Server, bodies
from benchmarks.gateway_load.mock import STREAM_TEXT
from benchmarks.gateway_load.own import own_gateway
from benchmarks.report import figure, median_pair, processor_times, stolen_since

_LIST = (
    b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"data":[]}'
)
_STREAMS = 48  # at a time
CHUNKS = 200  # of a stream
_PAUSE_S = 0.008  # between two chunks of a stream
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def paced_upstream() -> Iterator[str]:
    """Its address. It answers every POST with a stream, and everything else with an empty list."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    address: list[str] = []

    async def _run() -> None:
        server = await asyncio.start_server(partial(_serve, _events()), "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve_forever()

    task = loop.create_task(_run())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


async def _serve(
    events: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"POST"):
                writer.write(_LIST)
                continue
            await reader.readexactly(_length(head))
            writer.write(_HEAD)
            for event in events:
                writer.write(event)
                await asyncio.sleep(_PAUSE_S)
    writer.close()


def compare(
    home: Path, checkouts: dict[str, Path], rounds: int, seconds: float, *, guarded: bool = True
) -> None:
    """CPU time of a chunk, the first checkout's beside the second's if there is one, in turn.
    `guarded`: by the output guard of the default policy."""
    settings = {} if guarded else {"TOLLHOUSE_MODERATION": "off"}
    kind = "paced" if guarded else "paced-unguarded"
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(paced_upstream())
        gateways = {
            name: stack.enter_context(
                own_gateway(home / f"{kind}-{at}", upstream, checkout=path, settings=settings)
            )
            for at, (name, path) in enumerate(checkouts.items())
        }
        for each in gateways.values():
            asyncio.run(load(each.server, 1.0))
        spent: dict[str, list[float | None]] = {name: [] for name in gateways}
        before = processor_times()
        for number in range(rounds):
            names = list(gateways) if number % 2 else list(reversed(gateways))
            for name in names:
                gateway = gateways[name]
                since = cpu_s(gateway.pid)
                chunks = asyncio.run(load(gateway.server, seconds))
                spent[name].append((cpu_s(gateway.pid) - since) / chunks * 1e6)
    own, *others = checkouts
    found = median_pair(spent[own], spent[others[0]] if others else [])
    assert found is not None
    figure(
        "gateway.cpu_paced_chunk" if guarded else "gateway.cpu_unguarded_chunk",
        found[0],
        "us",
        False,
        others[0] if others else None,
        found[1],
        settings={
            "rounds": rounds,
            "streams": _STREAMS,
            "chunks_per_s_of_a_stream": round(1 / _PAUSE_S),
            "stolen_percent": stolen_since(before),
        },
    )


async def load(server: Server, seconds: float) -> int:
    """Chunks that the upstream sent for the streams that were read to their end. RuntimeError where
    an answer is not the upstream's text."""
    until = asyncio.get_running_loop().time() + seconds
    lines = bodies(server.model, stream=True)
    done = await asyncio.gather(
        *[_client(server, lines[number::_STREAMS], until) for number in range(_STREAMS)]
    )
    return sum(done) * CHUNKS


async def _client(server: Server, lines: list[str], until: float) -> int:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = "".join(f"{name}: {value}\r\n" for name, value in server.all_headers().items())
    count, clock = 0, asyncio.get_running_loop()
    while count == 0 or clock.time() < until:
        body = lines[count % len(lines)].encode()
        head = f"POST {server.path} HTTP/1.1\r\nhost: {host}\r\n{headers}"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        said = await reader.readuntil(b"\r\n0\r\n\r\n")
        if b"[DONE]" not in said or b'"error"' in said:
            raise RuntimeError(f"the stream is not whole: {said[-300:]!r}")
        count += 1
    writer.close()
    return count


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])


def _events() -> list[bytes]:
    """As HTTP chunks; the last one ends the answer."""
    shell = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    words = (STREAM_TEXT.split() * (CHUNKS // 100 + 1))[:CHUNKS]
    made = []
    for number, word in enumerate(words):
        reason = "stop" if number == CHUNKS - 1 else None
        choice = {"index": 0, "delta": {"content": f" {word}"}, "finish_reason": reason}
        made.append({**shell, "choices": [choice]})
    usage = {"prompt_tokens": 20, "completion_tokens": CHUNKS, "total_tokens": 20 + CHUNKS}
    events = [f"data: {json.dumps(each)}\n\n".encode() for each in made]
    last = f"data: {json.dumps({**shell, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
    framed = [b"%x\r\n%s\r\n" % (len(each), each) for each in [*events, last.encode()]]
    framed[-1] += b"0\r\n\r\n"
    return framed
