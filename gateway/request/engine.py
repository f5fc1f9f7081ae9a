"""The interface of engine clients: our engine over ZeroMQ, or any OpenAI-compatible server.

A client returns a `Generation` for each admitted request. Token engines return token ids, which the
gateway detokenises; text engines (OpenAI-compatible servers) return text with a token count.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from core.errors import EngineLost, TollhouseError, Unavailable
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    Receipt,
)
from engine.protocol import TokenChunk as TokenChunk  # re-exported: part of the interface
from gateway.request.inference import InferenceRequest
from gateway.request.thoughts import Annotation, Detail

log = logging.getLogger("tollhouse.upstream")


class TextChunk(Struct, frozen=True):
    """New output of one choice from a text engine."""

    request_id: str
    choice: int
    text: str
    count: int  # tokens by which the output grew, roughly: what the held money must cover
    finish_reason: str | None = None  # OpenAI's value
    logprobs: dict[str, Any] | None = None  # OpenAI's object, unchanged
    calls: list[dict[str, Any]] | None = None  # OpenAI's tool calls, or deltas of them
    vectors: list[bytes] | None = None  # embeddings, in input order: JSON as the server sent it
    scores: list[float] | None = None  # of /v1/rerank and /v1/score, in the documents' order
    reasoning: str = ""  # before the text
    refused: bool = False  # the server marked the text as a refusal
    # Reasoning up to here as its provider wants it back: see `request/thoughts.py`.
    details: list[Detail] | None = None
    annotations: list[Annotation] | None = None  # OpenAI's objects: citations of the text so far
    stop: str | None = None  # the stop string that ended the choice, where the server says it

    @property
    def characters(self) -> int:
        """Of reasoning, text and tool calls, the measure of how much of an answer was delivered."""
        size = len(self.text) + len(self.reasoning)
        return size + len(calls_text(self.calls)) if self.calls else size

    @property
    def plain(self) -> bool:
        """Whether the chunk is text only, and not the last one."""
        return (
            self.finish_reason is None
            and not self.reasoning
            and self.logprobs is None
            and self.calls is None
            and self.vectors is None
            and self.scores is None
            and not self.refused
            and self.details is None
            and self.annotations is None
        )


def calls_text(calls: list[dict[str, Any]]) -> str:
    """The generated parts of tool calls, or of deltas of them: names and arguments."""
    functions = [call.get("function") or {} for call in calls]
    return "".join([f"{f.get('name') or ''}{f.get('arguments') or ''}" for f in functions])


Chunk = TokenChunk | TextChunk


class Job(Struct, frozen=True):
    """One admitted request in the forms that token engines and text engines need."""

    engine_request: GenerateRequest  # clients of other servers read a few of its fields
    request: InferenceRequest
    parts: tuple["Job", ...] = ()  # for several prompts: one job each, with its own request id


class Generation(Protocol):
    """A running request. `take` returns all chunks that are ready, at least one; [] means the end.

    While plain text (`TextChunk.plain`) has fewer than `needed` characters, `take` may wait for more.
    """

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, once the engine has ended the request (also after a cancellation)."""

    async def take(self, needed: int = 1) -> list[Chunk]: ...

    def waiting(self) -> Sequence[Chunk]:
        """What the next `take` returns, as far as it has come."""

    def cancel(self) -> None:
        """Tell the engine to stop. Its receipt still arrives."""

    def terminate(self, error: TollhouseError) -> None:
        """Tell the engine to stop and make `take` raise the error, without waiting for a receipt."""

    async def ended(self, timeout_s: float) -> Receipt | None:
        """Wait for the receipt, discarding remaining chunks. None if it does not arrive in time."""

    def begun(self) -> bool:
        """Whether the engine said that it computes the request, so that its end may be the cause of
        the engine's. False where an engine does not say."""


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """Progress of an engine that is starting or loading its model."""

    elapsed_s: float  # seconds so far
    remaining_s: float  # estimate: the last start's duration, else as long again as it has taken


class EngineClient(Protocol):
    """`speaks_text` engines apply stop strings and chat templates themselves."""

    engine_id: str
    speaks_text: bool
    # Called with the engine's id and each receipt as it arrives, whatever became of its request.
    on_receipt: Callable[[str, Receipt], None] | None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def info(self) -> EngineInfo | None:
        """None until the engine has responded once."""

    def stats(self) -> EngineStats | None: ...

    def healthy(self) -> bool: ...

    @property
    def refusal(self) -> str:
        """Why it gets no requests although it answers, such as another model; else empty."""

    def silent(self) -> bool:
        """Whether it is connected but its heartbeat is overdue."""

    def last_output(self) -> float:
        """Monotonic time of the last output of any request; 0 before the first."""

    def startup_progress(self) -> StartupProgress | None:
        """Progress of its start; None if it is up, or if it is not expected to come up."""

    def adapters(self) -> Mapping[str, AdapterState]:
        """Registered adapters, by digest. Empty after the engine process restarted."""

    async def generate(self, job: Job) -> Generation:
        """Raises a TollhouseError if the engine refuses the request or does not respond."""

    async def load_adapter(self, path: str, digest: str) -> AdapterState:
        """Load and register an adapter. Token engines compute the digest; text engines trust it."""

    async def unload_adapter(self, digest: str) -> None: ...

    async def receipt(self, request_id: str) -> Receipt | None:
        """The receipt of an ended request; None if the engine has none for this id."""

    async def acknowledge(self, request_ids: list[str]) -> None:
        """Tell the engine that these receipts are durable here, so that it may drop them."""


def reporting(client: EngineClient) -> Callable[[Receipt], None]:
    """What a client's mailboxes call with each receipt: `on_receipt`, as it is set by then."""

    def _report(receipt: Receipt) -> None:
        if client.on_receipt is not None:
            client.on_receipt(client.engine_id, receipt)

    return _report


class RequestStillRunning(TollhouseError):
    """The request is still running, so its receipt does not exist yet."""


class Mailbox:
    """A Generation that a client fills from the engine's messages."""

    receipt: Receipt | None = None
    # Characters of plain text that the one who takes still waits for; who fills it may keep fewer.
    needed = 0
    # Given the choice, text and tokens of a piece of plain text, says whether it took them in place
    # of the one who waits in `take`.
    pass_text: Callable[[int, str, int], bool] | None = None
    # Given all chunks once they are what the one who takes needs: the characters needed next, where
    # it took them in the same way, or 0.
    pass_chunks: Callable[[Sequence[Chunk]], int] | None = None
    # Whether the engine has begun with the request of this id, where it says so.
    has_begun: Callable[[str], bool] | None = None
    # Whether the connection to the engine was lost: the receipt may come on the next one.
    lost = False
    given_up = False  # nobody waits for the receipt any more
    notes: tuple[str, ...] = ()  # what of the request is only approximated upstream
    _error: TollhouseError | None = None
    _fault: Exception | None = None  # of `pass_chunks`
    _over = False
    _waiter: asyncio.Future[None] | None = None

    def __init__(
        self,
        request_id: str,
        abort: Callable[[str], None],
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self._abort = abort
        self._on_receipt = on_receipt
        self._chunks: list[Chunk] = []

    @property
    def passes(self) -> bool:
        return self.pass_text is not None or self.pass_chunks is not None

    def put_text(self, choice: int, text: str, tokens: int) -> None:
        """A piece of plain text, which is passed on at once where the one who takes waits for it."""
        waits = self._waiter is not None and not self._waiter.done() and not self._chunks
        if waits and self.pass_text is not None and self.pass_text(choice, text, tokens):
            return
        self.put(TextChunk(self.request_id, choice, text, tokens))

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        if self.needed > 0:
            self._count(chunk)
            if self.needed <= 0 and not self._pass():
                self._wake()

    def _pass(self) -> bool:
        if self.pass_chunks is None:
            return False
        try:
            needed = self.pass_chunks(self._chunks)
        except (
            Exception
        ) as error:  # which the one who takes must hear of, not the upstream's reader
            self._fault, self.pass_chunks = error, None
            return False
        if needed > 0:
            self.needed, self._chunks = needed, []
        return needed > 0

    def finish(self, receipt: Receipt | None) -> None:
        self._report(receipt)
        self.receipt = receipt
        self._end()

    def fail(self, error: TollhouseError, receipt: Receipt | None = None) -> None:
        """`receipt`: of what was generated before the failure, where that is known."""
        if not self._over:
            self._report(receipt)
            self._error, self.receipt = error, receipt
            self._end()

    def lose(self, error: TollhouseError) -> None:
        """The connection was lost; a second time, there is no receipt to wait for."""
        self.lost = not self._over
        self.fail(error)
        self._wake()

    def _end(self) -> None:
        self._over = True
        # These refer to this mailbox by way of the delivery.
        self.pass_text = self.pass_chunks = None
        self._wake()

    async def take(self, needed: int = 1) -> list[Chunk]:
        self.needed = needed
        for chunk in self._chunks:
            self._count(chunk)
        while self.needed > 0 and not self._over:
            await self._wait()
        self.needed = 0
        if self._fault is not None:
            raise self._fault
        if not self._chunks and self._error is not None:
            raise self._error
        taken, self._chunks = self._chunks, []
        return taken

    def waiting(self) -> Sequence[Chunk]:
        return self._chunks

    def _count(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk) and chunk.plain:
            self.needed -= len(chunk.text)
        else:
            self.needed = 0

    def cancel(self) -> None:
        if not self._over:
            self._abort(self.request_id)

    def terminate(self, error: TollhouseError) -> None:
        if not self._over:
            self.fail(error)
            self._abort(self.request_id)

    def begun(self) -> bool:
        return self.has_begun is not None and self.has_begun(self.request_id)

    async def ended(self, timeout_s: float) -> Receipt | None:
        if self.receipt is not None:
            return self.receipt
        self.pass_text = self.pass_chunks = None
        try:
            async with asyncio.timeout(timeout_s):
                while not self._over or (self.lost and self.receipt is None):
                    self._chunks.clear()
                    self.needed = 1
                    await self._wait()
        except TimeoutError:
            self.given_up = True
            return None
        return self.receipt

    def _report(self, receipt: Receipt | None) -> None:
        if receipt is not None and self._on_receipt is not None:
            self._on_receipt(receipt)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def engine_lost(engine_id: str, why: str) -> EngineLost:
    """Of a request that the engine had begun with."""
    error = EngineLost(
        "The engine of this model stopped while it computed this request.",
        next_step="The request may be the cause, so it is not tried again; nothing is charged that was "
        "not delivered.",
        retry_after_s=1.0,
    )
    error.add_note(f"{engine_id}: {why}")
    log.warning("the engine %s stopped with a request that it had begun: %s", engine_id, why)
    return error


def engine_unavailable(engine_id: str, why: str) -> Unavailable:
    """`why` may name hosts of the operator, so it goes to the log and not to the client."""
    error = Unavailable(
        "The engine of this model does not answer.",
        next_step="Try again; only delivered tokens are charged.",
        code="engine_unavailable",
        retry_after_s=1.0,
    )
    error.add_note(f"{engine_id}: {why}")
    log.info("the engine %s does not answer: %s", engine_id, why)
    return error
