"""Deliveries that record an engine's output, and that give a recorded one again.

A cached answer passes the same steps as a new one: the output guard, stop strings and tool calls are
applied to what the engine had generated, and each surface writes it, streamed or whole.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from core.errors import TollhouseError
from core.events import UsageEvent
from engine.protocol import Receipt
from gateway.answers.chunks import tokens_of
from gateway.answers.coverage import FreeCoverage
from gateway.answers.delivery import Delivery
from gateway.engines.routing.router import Route
from gateway.request.engine import Chunk, Generation, Job, TextChunk, TokenChunk
from gateway.serving.cached_answers import CachedAnswer, Lookup

if TYPE_CHECKING:
    from gateway.serving.context import RequestContext

_COMPLETE = ("stop", "length", "tool_calls")
_MODERATED = (None, "annotate", "redact")  # neither blocked nor left unscanned
_MAX_RECORDED = 100_000  # of a recorded answer; of text engines, characters and tokens
_encoder = msgspec.msgpack.Encoder()
_texts = msgspec.msgpack.Decoder(list[TextChunk])
_tokens = msgspec.msgpack.Decoder(list[TokenChunk])


class Recording:
    """A generation whose chunks are kept."""

    def __init__(self, generation: Generation, *, text: bool) -> None:
        self.text = text
        self._generation = generation
        self._chunks: list[Chunk] | None = []  # None: too many
        self._recorded = 0

    @property
    def receipt(self) -> Receipt | None:
        return self._generation.receipt

    @property
    def notes(self) -> tuple[str, ...]:
        found: tuple[str, ...] = getattr(self._generation, "notes", ())
        return found

    async def take(self, needed: int = 1) -> list[Chunk]:
        chunks = await self._generation.take(needed)
        if self._chunks is not None:
            self._chunks += chunks
            self._recorded += sum([_weight(chunk) for chunk in chunks])
            if self._recorded > _MAX_RECORDED:
                self._chunks = None
        return chunks

    def waiting(self) -> Sequence[Chunk]:
        return self._generation.waiting()

    def cancel(self) -> None:
        self._generation.cancel()

    def begun(self) -> bool:
        return self._generation.begun()

    def terminate(self, error: TollhouseError) -> None:
        self._generation.terminate(error)

    async def ended(self, timeout_s: float) -> Receipt | None:
        return await self._generation.ended(timeout_s)

    def encoded(self) -> bytes | None:
        """None if the answer was too long to be kept."""
        return _encoder.encode(self._chunks) if self._chunks else None


class RecordingDelivery(Delivery):
    """Keeps the answer in the cache once it is complete and moderated."""

    def __init__(self, ctx: "RequestContext", *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._ctx = ctx
        self._recording: Recording | None = None  # of the last attempt

    async def run(self, route: Route, job: Job, *, final: bool = True) -> int:
        status = await super().run(route, job, final=final)
        event, recording = self._meter.event, self._recording
        if event is not None and recording is not None and _may_keep(event):
            self._keep(recording)
        return status

    def _keep(self, recording: Recording) -> None:
        lookup, chunks = self._ctx.lookup, recording.encoded()
        if lookup is None or lookup.key is None or lookup.rule is None or chunks is None:
            return
        answer = CachedAnswer(
            chunks,
            recording.text,
            self._ctx.request_id,
            lookup.at,
            lookup.at + lookup.rule.ttl_s,
            lookup.epoch,
        )
        lookup.store.put(self._ctx.principal.tenant_id, lookup.key, answer)

    async def _start_generation(self, route: Route, job: Job) -> Generation:
        generation = await super()._start_generation(route, job)
        assert route.replica is not None
        self._recording = Recording(generation, text=route.replica.client.speaks_text)
        self._generation = self._recording
        return self._recording


class CachedGeneration:
    """A generation that has ended, without a receipt: no engine ran."""

    receipt: Receipt | None = None

    def __init__(self, answer: CachedAnswer) -> None:
        decoder: Any = _texts if answer.text else _tokens
        self._chunks: list[Chunk] = decoder.decode(answer.chunks)

    async def take(self, needed: int = 1) -> list[Chunk]:
        taken, self._chunks = self._chunks, []
        return taken

    def waiting(self) -> Sequence[Chunk]:
        return self._chunks

    def cancel(self) -> None:
        self._chunks = []

    def begun(self) -> bool:
        return False

    def terminate(self, error: TollhouseError) -> None:
        self._chunks = []

    async def ended(self, timeout_s: float) -> Receipt | None:
        return None


class CachedDelivery(Delivery):
    def __init__(self, answer: CachedAnswer, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._coverage = FreeCoverage(named["reservation"])
        self._answer_again = answer

    async def _start_generation(self, route: Route, job: Job) -> Generation:
        self._counted_by = None
        self._begin_choices(job, text=self._answer_again.text)
        self._generation = CachedGeneration(self._answer_again)
        return self._generation


def delivery_of(ctx: "RequestContext", lookup: Lookup) -> Callable[..., Delivery]:
    """The class of a request's delivery, with what it needs of the cache."""
    if lookup.hit is not None:
        return partial(CachedDelivery, lookup.hit)
    if lookup.key is None or ctx.fallback_from:
        return Delivery
    return partial(RecordingDelivery, ctx)


def _may_keep(event: UsageEvent) -> bool:
    complete = event.status == 200 and event.finish_reason in _COMPLETE
    return complete and event.moderation in _MODERATED


def _weight(chunk: Chunk) -> int:
    return tokens_of(chunk) + (chunk.characters if isinstance(chunk, TextChunk) else 0)
