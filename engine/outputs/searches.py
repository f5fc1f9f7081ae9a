"""Requests with beam search: each step of each beam is a request of its own inside the engine, which
finds the beam's keys and values in the prefix cache. The gateway sees one request and one receipt.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.errors import AdapterError
from engine.outputs.beams import BeamSearch
from engine.outputs.results import Outbox
from engine.protocol import (
    WHOLE,
    FinishReason,
    GenerateRequest,
    Receipt,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from engine.receipts import Receipts

_ORIGIN = "\x00beams"  # of the requests inside; never a gateway


@dataclass(slots=True)
class _Search:
    inputs: GenerateRequest
    origin: str
    limit: int
    arrived: float
    beams: BeamSearch
    waiting: dict[str, int] = field(default_factory=dict)  # beam numbers by the id of its request
    steps: dict[int, TokenLogprob] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    failure: tuple[FinishReason, str] | None = None


class Inside(Protocol):
    """What a search asks of the engine."""

    def enqueue(self, inputs: GenerateRequest, origin: str, limit: int) -> None: ...

    def abort(self, request_id: str) -> bool: ...


@dataclass(slots=True)
class BeamSearches:
    engine: Inside
    receipts: Receipts
    eos: frozenset[int]
    clock: Callable[[], float]
    _open: dict[str, _Search] = field(default_factory=dict)
    _inside: dict[str, _Search] = field(default_factory=dict)  # by the id of a request inside

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def keys(self) -> Set[str]:
        return self._open.keys()

    def of(self, origin: str) -> list[str]:
        return [name for name, search in self._open.items() if search.origin == origin]

    def asked_by(self, origin: str, name: str) -> tuple[str, str]:
        """The gateway and the request that a request is part of: of its own, unless it is inside."""
        search = self._inside.get(name)
        return (origin, name) if search is None else (search.origin, search.inputs.request_id)

    def start(self, inputs: GenerateRequest, origin: str, limit: int) -> None:
        """limit: the most positions of a beam, the prompt included. Raises AdapterError."""
        length = len(inputs.prompt)
        beams = BeamSearch(length, inputs.sampling, self.eos, limit - length)
        search = _Search(inputs, origin, limit, self.clock(), beams)
        self._ask(search)
        self._open[inputs.request_id] = search

    def abort(self, request_id: str, origin: str | None) -> bool:
        """Whether there is such a search, of the gateway `origin` if that is given."""
        search = self._open.get(request_id)
        if search is None or origin not in (None, search.origin):
            return False
        self._fail(search, FinishReason.ABORT, "")
        return True

    def collect(self, outboxes: dict[str, Outbox]) -> dict[str, Outbox]:
        """Takes the output of the requests inside; adds that of searches that have ended."""
        inside = outboxes.pop(_ORIGIN, None)
        if inside is None:
            return outboxes
        for chunk in inside.chunks:
            search = self._inside[chunk.request_id]
            if chunk.logprobs:
                search.steps[search.waiting[chunk.request_id]] = chunk.logprobs[0]
        for receipt in inside.receipts:
            search = self._inside.pop(receipt.request_id)
            del search.waiting[receipt.request_id]
            search.receipts.append(receipt)
            if receipt.finish_reason not in WHOLE and search.failure is None:
                self._fail(search, receipt.finish_reason, receipt.message)
            if not search.waiting:
                self._go_on(search, outboxes)
        self.receipts.acknowledge([each.request_id for each in inside.receipts], _ORIGIN)
        return outboxes

    def _go_on(self, search: _Search, outboxes: dict[str, Outbox]) -> None:
        if search.failure is None:
            search.beams.advance([search.steps[n] for n in range(len(search.beams.live))])
        if search.failure is None and not search.beams.done:
            try:
                self._ask(search)
            except AdapterError as error:
                self._fail(search, FinishReason.ERROR, error.message)
        if not search.waiting:
            self._end(search, outboxes)

    def _ask(self, search: _Search) -> None:
        """One request for the next tokens of each live beam."""
        inputs, search.steps = search.inputs, {}
        left = None
        if inputs.deadline_s is not None:
            left = inputs.deadline_s - (self.clock() - search.arrived)
            if left <= 0:
                self._fail(search, FinishReason.DEADLINE, f"{inputs.deadline_s:g} s passed")
                return
        given = inputs.sampling
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=search.beams.candidates,
            ignore_eos=True,
            logit_bias=given.logit_bias,
            allowed_token_ids=given.allowed_token_ids,
        )
        for number, beam in enumerate(search.beams.live):
            name = f"{inputs.request_id}\x00{len(beam.tokens)}.{number}"
            prompt = [*inputs.prompt, *beam.tokens]
            step = replace(
                inputs, request_id=name, prompt=prompt, sampling=sampling, deadline_s=left, note=""
            )
            self.engine.enqueue(step, _ORIGIN, search.limit)
            search.waiting[name] = number
            self._inside[name] = search

    def _fail(self, search: _Search, reason: FinishReason, message: str) -> None:
        search.failure = search.failure or (reason, message)
        for name in list(search.waiting):
            self.engine.abort(name)

    def _end(self, search: _Search, outboxes: dict[str, Outbox]) -> None:
        inputs, outbox = search.inputs, outboxes.setdefault(search.origin, Outbox())
        best = [] if search.failure else search.beams.best()
        name = inputs.request_id
        for choice in range(inputs.sampling.n):
            if choice >= len(best):
                reason = search.failure[0] if search.failure else FinishReason.STOP
                outbox.chunks.append(TokenChunk(name, choice, [], None, reason))
                continue
            beam, reason = best[choice]
            listed = None if inputs.sampling.logprobs is None else list(beam.listed)
            outbox.chunks.append(TokenChunk(name, choice, list(beam.tokens), listed, reason))
        receipt = self._receipt(search, sum(len(beam.tokens) for beam, _ in best))
        self.receipts.add(search.origin, receipt)
        outbox.receipts.append(receipt)
        del self._open[name]

    def _receipt(self, search: _Search, delivered: int) -> Receipt:
        """The prompt is that of the first step. What later steps computed of prompt and beams again is
        not charged."""
        first, *later = search.receipts
        inputs, (reason, message) = search.inputs, search.failure or (FinishReason.LENGTH, "")
        if search.failure is None and all(r is FinishReason.STOP for _, r in search.beams.best()):
            reason = FinishReason.STOP
        took = self.clock() - search.arrived
        receipt = replace(
            first,
            request_id=inputs.request_id,
            generated=max(search.beams.generated, delivered),
            delivered=delivered,
            recomputed=first.recomputed + sum(r.computed + r.recomputed for r in later),
            discarded=sum(r.discarded for r in search.receipts),
            finish_reason=reason,
            decode_s=max(0.0, took - first.queue_s - first.prefill_s),
            message=message,
            note=inputs.note,
            busy_us=sum(r.busy_us for r in search.receipts),
            dropped=max(r.dropped for r in search.receipts),
        )
        if reason is not FinishReason.ERROR:
            return receipt
        return replace(receipt, prompt=0, cached=0, computed=0, unprocessed=len(inputs.prompt))
