"""The port to whatever generates: one engine process, many, or someone else's server.

A client gives a `Generation` per admitted request. Token engines answer in ids, which the door
turns into text; text engines (OpenAI-compatible servers) answer in text with a count.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from core.errors import TollhouseError, Unavailable
from engine.protocol import AdapterState, EngineInfo, EngineStats, GenerateRequest, Receipt
from engine.protocol import TokenChunk as TokenChunk  # part of the port
from gateway.ask import Ask


class TextChunk(Struct, frozen=True):
    """New output of one choice from an engine that speaks text."""

    request_id: str
    choice: int
    text: str
    count: int  # tokens in it: exact where the engine says so, else one a chunk
    finish_reason: str | None = None  # OpenAI's word
    logprobs: dict[str, Any] | None = None  # OpenAI's object, passed on
    calls: list[dict[str, Any]] | None = None  # OpenAI's tool calls, or pieces of them
    vectors: list[Any] | None = None  # embeddings: lists of numbers or base64, in the inputs' order

    @property
    def plain(self) -> bool:
        """Nothing but text in mid-answer."""
        return (
            self.finish_reason is None
            and self.logprobs is None
            and self.calls is None
            and self.vectors is None
        )


Chunk = TokenChunk | TextChunk


class Job(Struct, frozen=True):
    """One admitted request, with what each kind of engine needs."""

    request: GenerateRequest
    ask: Ask
    parts: tuple["Job", ...] = ()  # of several prompts: one each, under names of their own


class Generation(Protocol):
    """One running request. `take` gives all that is ready, at least one chunk, and [] at the end."""

    @property
    def receipt(self) -> Receipt | None:
        """Once the engine has ended the request, also after a cancel."""

    async def take(self) -> list[Chunk]: ...

    def cancel(self) -> None:
        """Ask the engine to stop; its receipt still comes."""

    def break_off(self, error: TollhouseError) -> None:
        """Nobody waits for it any more: `take` raises the error, and the engine is told to stop."""

    async def ended(self, timeout_s: float) -> Receipt | None:
        """Wait for the receipt, reading past what is left; None if it does not come in time."""


@dataclass(frozen=True, slots=True)
class Coming:
    """An engine that is being started or loads its model."""

    for_s: float  # so far
    left_s: float  # as long as it took the last time; else as long again as it has been


class EngineClient(Protocol):
    """`speaks_text` engines apply stop strings and chat templates themselves."""

    engine_id: str
    speaks_text: bool

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def info(self) -> EngineInfo | None:
        """None until the engine has answered once."""

    def stats(self) -> EngineStats | None: ...

    def healthy(self) -> bool: ...

    def silent(self) -> bool:
        """Whether it is connected and owes a sign of life for longer than is usual with it."""

    def last_output(self) -> float:
        """When (monotonic) a token or an answer of whichever request came; 0 before the first."""

    def coming(self) -> Coming | None:
        """None of one that is there, and of one that nobody expects."""

    def adapters(self) -> Mapping[str, AdapterState]:
        """What it knows of adapters now, by digest. Empty after the process behind it restarted."""

    async def generate(self, job: Job) -> Generation:
        """Raises a TollhouseError where the engine refuses or does not answer."""

    async def load_adapter(self, path: str, digest: str) -> AdapterState:
        """Read, check and register. A text engine cannot tell the digest and is given it."""

    async def unload_adapter(self, digest: str) -> None: ...

    async def receipt(self, request_id: str) -> Receipt | None:
        """What the engine recorded for an ended request; None if it knows nothing of it."""

    async def acknowledge(self, request_ids: list[str]) -> None:
        """These receipts are durable on our side; the engine may forget them."""


class RequestStillRuns(TollhouseError):
    """Its receipt is not written yet: ask again later."""


class Mailbox:
    """A Generation that a client fills as the engine's messages come in."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.receipt: Receipt | None = None
        self._abort = abort
        self._chunks: list[Chunk] = []
        self._error: TollhouseError | None = None
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._wake()

    def finish(self, receipt: Receipt | None) -> None:
        self.receipt = receipt
        self._over = True
        self._wake()

    def fail(self, error: TollhouseError) -> None:
        if not self._over:
            self._error = error
            self._over = True
            self._wake()

    async def take(self) -> list[Chunk]:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._over:
                return []
            await self._wait()
        taken, self._chunks = self._chunks, []
        return taken

    def cancel(self) -> None:
        if not self._over:
            self._abort(self.request_id)

    def break_off(self, error: TollhouseError) -> None:
        if not self._over:
            self.fail(error)
            self._abort(self.request_id)

    async def ended(self, timeout_s: float) -> Receipt | None:
        if self.receipt is not None:
            return self.receipt
        try:
            async with asyncio.timeout(timeout_s):
                while not self._over:
                    self._chunks.clear()
                    await self._wait()
        except TimeoutError:
            return None
        return self.receipt

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def engine_gone(engine_id: str, why: str) -> Unavailable:
    return Unavailable(
        f"The engine {engine_id} does not answer: {why}.",
        next_step="Try again; what was delivered is all that is charged.",
        code="engine_unavailable",
        retry_after_s=1.0,
    )
