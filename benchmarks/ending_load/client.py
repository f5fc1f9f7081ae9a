"""The client: asks with some requests at once, and keeps what each answer said of its usage."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.ending_load.requests import Asked


@dataclass(frozen=True, slots=True)
class Answered:
    asked: Asked
    status: int  # 0: the connection ended first
    request_id: str
    output: int | None  # tokens that the answer says were charged; None where it says nothing


async def ask_all(url: str, requests: Iterable[Asked], at_once: int) -> AsyncIterator[Answered]:
    """In the order in which they end."""
    waiting = iter(requests)
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        running = {asyncio.create_task(_ask(session, each)) for each in _some(waiting, at_once)}
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
            running |= {
                asyncio.create_task(_ask(session, each)) for each in _some(waiting, len(done))
            }


def _some(requests: Iterable[Asked], count: int) -> list[Asked]:
    return list(itertools.islice(requests, count))


async def _ask(session: aiohttp.ClientSession, asked: Asked) -> Answered:
    status, request_id, received = 0, "", b""
    try:
        async with asyncio.timeout(0.03 if asked.leaves == "before" else None):
            async with session.post(asked.route, data=asked.body, headers=asked.headers) as answer:
                status, request_id = answer.status, answer.headers.get("x-request-id", "")
                if asked.leaves == "in":
                    await answer.content.read(200)
                    answer.close()
                    return Answered(asked, status, request_id, None)
                received = await answer.read()
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        return Answered(asked, status, request_id, None)
    return Answered(asked, status, request_id, _output_of(asked, received, status))


def _output_of(asked: Asked, received: bytes, status: int) -> int | None:
    if status != 200:
        return None
    if not asked.stream:
        return _tokens(json.loads(received))
    found = None
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("error"):
                return None
            said = _tokens(event)
            found = found if said is None else said
    return found


def _tokens(body: dict[str, Any]) -> int | None:
    """Of an answer or an event of any surface."""
    usage = body.get("usage") or (body.get("response") or {}).get("usage")
    if not usage:
        return None
    if body.get("object") == "list":  # embeddings have no output
        return 0
    return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))
