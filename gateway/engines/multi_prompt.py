"""Runs the several prompts of one request as separate generations and merges them into one.

The merged generation numbers its choices prompt by prompt, and its receipt is the sum of theirs.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

import msgspec

from core.errors import TollhouseError
from engine.protocol import Receipt
from gateway.request.engine import Chunk, EngineClient, Generation, Job, TextChunk
from gateway.request.receipts import UpstreamReceipt, merged_receipt


async def generate(client: EngineClient, job: Job) -> Generation:
    started = await start_all(client, job.parts)
    return MergedGeneration(job.engine_request.request_id, started, job.request.n)


async def start_all(client: EngineClient, parts: Sequence[Job]) -> list[Generation]:
    """If the engine refuses one, the others are cancelled and its error is raised."""
    started: list[Generation] = []
    try:
        for part in parts:
            started.append(await client.generate(part))
    except BaseException:
        for each in started:
            each.cancel()
        raise
    return started


class MergedGeneration:
    """A Generation that merges several others; `take` waits for the first that has chunks."""

    def __init__(self, request_id: str, parts: Sequence[Generation], choices: int) -> None:
        """`choices` is the number per part: the choices of part k are numbered from k * choices."""
        self._request_id = request_id
        self._parts = parts
        self._choices = choices
        self._pending: dict[int, asyncio.Task[list[Chunk]]] = {}
        self._over: set[int] = set()

    @property
    def receipt(self) -> Receipt | None:
        known = [part.receipt for part in self._parts if part.receipt is not None]
        # A part of a text engine that failed before any output has no receipt, nor any tokens.
        whole = len(known) == len(self._parts) or isinstance(
            next(iter(known), None), UpstreamReceipt
        )
        return merged_receipt(self._request_id, known) if known and whole else None

    async def take(self, needed: int = 1) -> list[Chunk]:
        while len(self._over) < len(self._parts):
            for index, part in enumerate(self._parts):
                if index not in self._over and index not in self._pending:
                    task = self._pending[index] = asyncio.ensure_future(part.take())
                    task.add_done_callback(_retrieve_exception)
            await asyncio.wait(self._pending.values(), return_when=asyncio.FIRST_COMPLETED)
            if chunks := self._collect():
                return chunks
        return []

    def waiting(self) -> Sequence[Chunk]:
        return [chunk for part in self._parts for chunk in part.waiting()]

    def _collect(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for index in [index for index, task in self._pending.items() if task.done()]:
            ready = self._pending.pop(index).result()
            if not ready:
                self._over.add(index)
            chunks += [self._numbered(chunk, index) for chunk in ready]
        return chunks

    def _numbered(self, chunk: Chunk, index: int) -> Chunk:
        choice = index * self._choices + chunk.choice
        if isinstance(chunk, TextChunk):
            return msgspec.structs.replace(chunk, choice=choice)
        return dataclasses.replace(chunk, choice=choice)

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def begun(self) -> bool:
        return any(part.begun() for part in self._parts)

    def terminate(self, error: TollhouseError) -> None:
        for part in self._parts:
            part.terminate(error)

    async def ended(self, timeout_s: float) -> Receipt | None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        self._pending.clear()
        await asyncio.gather(*(part.ended(timeout_s) for part in self._parts))
        return self.receipt


def _retrieve_exception(task: "asyncio.Task[list[Chunk]]") -> None:
    """Retrieve the exception: asyncio logs one that is never retrieved."""
    if not task.cancelled():
        task.exception()
