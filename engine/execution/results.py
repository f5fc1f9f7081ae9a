"""Processes the results of a step: counts tokens, accepts them and ends finished sequences."""

from dataclasses import dataclass, field
from typing import Any

from engine.batch import NOT_FINITE, Row, Sampled
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import IntegrityError
from engine.metrics import Metrics
from engine.protocol import FinishReason, Receipt, TokenChunk, TokenLogprob
from engine.receipts import Receipts
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Request, Sequence, SequenceStatus


@dataclass(slots=True)
class LaunchedStep:
    """A step that is launched and not collected yet."""

    rows: list[tuple[Sequence, Row]]
    ticket: Any  # what the runner's `launch` returned
    launched_at: float


@dataclass(slots=True)
class Outbox:
    """The content of the next message to one gateway."""

    chunks: list[TokenChunk] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)


@dataclass(slots=True)
class OutputProcessor:
    """Applies collected steps to sequences and requests, and ends them."""

    config: EngineConfig
    scheduler: Scheduler
    pool: BlockPool
    metrics: Metrics
    receipts: Receipts
    eos: frozenset[int]
    outboxes: dict[str, Outbox] = field(default_factory=dict)
    ended: list[Request] = field(default_factory=list)  # ended since the last `take_outboxes`

    def accept(self, launched: LaunchedStep, sampled: list[Sampled], now: float) -> None:
        by_number = {result.seq: result for result in sampled}
        for seq, row in launched.rows:
            seq.in_flight -= 1
            self._account(seq, row)
            result = by_number.get(row.seq)
            if row.sample and result is None:
                raise IntegrityError(f"the runner returned no token for sequence {row.seq}")
            if seq.status is SequenceStatus.FINISHED:
                self._discard(seq, result, now)
                continue
            if result is not None and result.token == NOT_FINITE:
                self._end_not_finite(seq.request, now)
                continue
            self._cache_filled_blocks(seq, row)
            if result is not None:
                seq.pending -= 1
                self._take_token(seq, result, now)

    def fail(self, launched: LaunchedStep, message: str, now: float) -> None:
        """The step failed on the device: its requests end with an error, all others go on."""
        for seq, row in launched.rows:
            seq.in_flight -= 1
            seq.pending = 0
            self.scheduler.waiting.refund(seq, self.scheduler.cost_of(seq, row))
        for seq, _ in launched.rows:
            if seq.status is SequenceStatus.FINISHED:
                self._discard(seq, None, now)
            else:
                self.end_request(seq.request, FinishReason.ERROR, now, message)

    def _end_not_finite(self, request: Request, now: float) -> None:
        """Nothing is charged if no token was delivered. What was delivered before stays charged, or
        an adapter that overflows at its last token would answer for nothing."""
        source = "the model" if request.inputs.adapter is None else "the model with its adapter"
        request.voided = not request.delivered
        self.metrics.add("not_finite")
        self.end_request(
            request, FinishReason.ERROR, now, f"{source} computed logits that are not finite"
        )

    def end_request(
        self, request: Request, reason: FinishReason, now: float, message: str = ""
    ) -> None:
        """End all choices of a request; its receipt follows when no step of it is in flight."""
        request.message = message
        request.finish_reason = reason
        for seq in request.sequences:
            if seq.status is not SequenceStatus.FINISHED:
                self._emit(seq, [], None, reason)
                self.scheduler.stop(seq)
        self._settle(request, now)

    def abandon(self, requests: list[Request], now: float, message: str) -> None:
        """Write receipts without releasing blocks or adapters, whose state may be corrupt."""
        for request in requests:
            if request.settled:
                continue
            request.finish_reason, request.message = FinishReason.ERROR, message
            for seq in request.sequences:
                if seq.status is not SequenceStatus.FINISHED:
                    self._emit(seq, [], None, FinishReason.ERROR)
                    seq.status, seq.in_flight = SequenceStatus.FINISHED, 0
            self._settle(request, now)

    def _account(self, seq: Sequence, row: Row) -> None:
        end = row.start + len(row.tokens)
        if row.start >= seq.prompt_len and row.start >= seq.counted_until:
            seq.counted_until = end  # plain decoding is counted by its generated token
            return
        first_new = max(row.start, seq.counted_until)
        computed = max(0, min(end, seq.prompt_len) - first_new)
        recomputed = max(0, min(end, seq.counted_until) - row.start)
        request = seq.request
        request.computed += computed
        request.recomputed += recomputed
        seq.counted_until = max(seq.counted_until, end)
        self.metrics.add("computed_tokens", computed)
        self.metrics.add("recomputed_tokens", recomputed)

    def _discard(self, seq: Sequence, result: Sampled | None, now: float) -> None:
        if result is not None:
            seq.request.discarded += 1
            self.metrics.add("discarded_tokens")
            self.scheduler.waiting.refund(seq, self.config.output_price)
        if not seq.in_flight:
            self.scheduler.release(seq)
            self._settle(seq.request, now)

    def _cache_filled_blocks(self, seq: Sequence, row: Row) -> None:
        """Enter the blocks that this row filled in the prefix cache."""
        if not self.config.prefix_cache:
            return
        size = self.config.block_size
        first, last = row.start // size, (row.start + len(row.tokens)) // size
        if first == last:
            return
        if len(seq.keys) < last:
            self.scheduler.extend_keys(seq)
        for index in range(first, last):
            parent = seq.keys[index - 1] if index else None
            owner = self.scheduler.owner_of(seq, index)
            self.pool.cache(seq.blocks[index], seq.keys[index], owner, parent)

    def _take_token(self, seq: Sequence, result: Sampled, now: float) -> None:
        request, params = seq.request, seq.request.inputs.sampling
        seq.history.append(result.token)
        request.generated += 1
        self.metrics.counters["generated_tokens"] += 1
        if request.inputs.adapter is not None:
            tokens = self.metrics.adapter_tokens
            tokens[request.inputs.adapter] = tokens.get(request.inputs.adapter, 0) + 1
        if request.first_token_at is None:
            request.first_token_at = now
            self.metrics.observe("first_token_seconds", now - request.arrived)
        elif seq.output_len > 1:
            self.metrics.observe("inter_token_seconds", now - seq.last_token_at)
        seq.last_token_at = now
        logprobs = None
        if params.logprobs is not None:
            logprobs = [TokenLogprob(result.token, result.logprob or 0.0, result.top)]
        reason = self._end_of(seq, result.token)
        self._emit(seq, [result.token], logprobs, reason)
        if reason is not None:
            request.finish_reason = request.finish_reason or reason
            self.scheduler.stop(seq)
            self._settle(request, now)

    def _end_of(self, seq: Sequence, token: int) -> FinishReason | None:
        params, length = seq.request.inputs.sampling, seq.output_len
        ended = token in params.stop_token_ids or (token in self.eos and not params.ignore_eos)
        if ended and length >= params.min_tokens:
            return FinishReason.STOP
        if length >= params.max_tokens or len(seq.history) >= seq.request.limit:
            return FinishReason.LENGTH
        return None

    def _emit(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        reason: FinishReason | None,
    ) -> None:
        request = seq.request
        chunk = TokenChunk(request.inputs.request_id, seq.choice, tokens, logprobs, reason)
        self.outboxes.setdefault(request.origin, Outbox()).chunks.append(chunk)
        request.delivered += len(tokens)
        self.metrics.counters["delivered_tokens"] += len(tokens)

    def _settle(self, request: Request, now: float) -> None:
        if request.settled or request.open or request.in_flight:
            return
        request.settled = True
        receipt = request.receipt(now)
        if receipt.cached + receipt.computed != receipt.prompt or receipt.unprocessed < 0:
            raise IntegrityError(f"the receipt of {receipt.request_id} does not add up: {receipt}")
        self.receipts.add(request.origin, receipt)
        self.outboxes.setdefault(request.origin, Outbox()).receipts.append(receipt)
        self.ended.append(request)
        self.metrics.add("prompt_tokens", receipt.prompt)
        self.metrics.add("cached_tokens", receipt.cached)
        self.metrics.add("unprocessed_tokens", receipt.unprocessed)
        self.metrics.add("voided_tokens", request.computed - receipt.computed)
        self.metrics.finish(receipt.finish_reason.value)
        self.metrics.observe("queue_seconds", receipt.queue_s)
        self.metrics.observe("request_seconds", now - request.arrived)
