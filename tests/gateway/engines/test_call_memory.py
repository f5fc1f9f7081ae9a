"""A call that has ended, however it did, is freed at once: not only by the garbage collector, which
would keep the request and its prompt for hundreds of requests more."""

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from engine.protocol import GenerateRequest, SamplingParams
from gateway.engines.http_pool import HttpPool
from gateway.engines.openai_response import ResponseParser
from gateway.request.engine import Job, Mailbox
from gateway.request.inference import InferenceRequest
from tests.gateway.engines.test_http_calls import against, read

_CHOICE = {"index": 0, "message": {"content": "Hi."}, "delta": {"content": "Hi."}}
_EVENT = json.dumps({"choices": [_CHOICE]})
ANSWERS = {
    "whole": ("200 OK", "application/json", _EVENT),
    "stream": ("200 OK", "text/event-stream", f"data: {_EVENT}\n\ndata: [DONE]\n\n"),
    "refused": ("503 Busy", "application/json", '{"error":{"message":"busy"}}'),
    "malformed": ("200 OK", "application/json", "{"),
    "left": ("200 OK", "text/event-stream", f"data: {_EVENT}\n\n"),
}


@pytest.fixture(scope="module", autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ending", ANSWERS)
def test_nothing_of_an_ended_call_waits_for_the_collector(ending: str) -> None:
    status, kind, body = ANSWERS[ending]
    more = 100 if ending == "left" else 0  # bytes that never come

    async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body) + more}"
        writer.write(f"{head}\r\n\r\n{body}".encode())
        await asyncio.sleep(5 if more else 0)

    async def _test(pool: HttpPool) -> None:
        ref, mailbox = await _ended_call(pool, leaves=bool(more))
        await asyncio.sleep(0.05)  # the transport's own callbacks
        assert ref() is None
        assert (mailbox._error is not None) == (ending in ("refused", "malformed"))

    against(_serve, _test)


async def _ended_call(
    pool: HttpPool, *, leaves: bool
) -> tuple[weakref.ref[ResponseParser], Mailbox]:
    messages = [{"role": "user", "content": "Hi"}]
    request = InferenceRequest("/v1/chat/completions", "m", messages=messages)
    job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(500)), request)
    over = asyncio.Event()
    mailbox = Mailbox("r", lambda _: None)
    parser = ResponseParser("e", job, mailbox, lambda _: over.set())
    parser.terminate = await pool.post("/v1/x", b"{}", parser)
    if leaves:
        await mailbox.take()
        parser.abort()
    await asyncio.wait_for(over.wait(), 5)
    return weakref.ref(parser), mailbox
