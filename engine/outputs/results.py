"""Processes the results of a step: counts tokens, accepts them and ends finished sequences."""

from dataclasses import dataclass, field
from typing import Any

from engine.batch import Row, Sampled
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import IntegrityError
from engine.metrics import Metrics
from engine.outputs.best_of import best_choices
from engine.protocol import FinishReason, Receipt, SamplingParams, TokenChunk, TokenLogprob
from engine.receipts import Receipts
from engine.scheduling.cost import row_cost
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
            result = by_number.get(row.seq)
            if result is None and (row.sample or row.scored):
                raise IntegrityError(f"the runner returned nothing for sequence {row.seq}")
            if result is not None and result.scores is not None:
                seq.request.add_scores(row.start + 1, result.scores)
            if result is not None and result.attention is not None:
                assert self.scheduler.eviction is not None
                self.scheduler.eviction.choose(seq.request, result.attention)
            if result is not None and not row.sample and not result.error:
                result = None
            end = row.position if result is None else self._verify(seq, row, result)
            seq.request.reach(row.start, end)
            self._account(seq, row, end)
            if seq.status is SequenceStatus.FINISHED:
                self._discard(seq, result if row.sample else None, now)
            elif result is not None and result.error:
                self._end_failed(seq.request, result.error, now)
            else:
                self._take(seq, row, end, result, now)
                self.scheduler.tables.release_unread(seq, min(end, seq.computed))

    def fail(self, launched: LaunchedStep, message: str, now: float) -> None:
        """The step failed on the device: its requests end with an error, all others go on."""
        for seq, row in launched.rows:
            seq.in_flight -= 1
            seq.pending = 0
            self.scheduler.waiting.refund(seq, row_cost(seq, row, self.config))
        for seq, _ in launched.rows:
            if seq.status is SequenceStatus.FINISHED:
                self._discard(seq, None, now)
            else:
                self.end_request(seq.request, FinishReason.ERROR, now, message)

    def _verify(self, seq: Sequence, row: Row, result: Sampled) -> int:
        """Counts the guesses that proved wrong. Returns up to which position KV is now present: the
        KV of wrong guesses will be overwritten."""
        if not result.tokens and not result.error:  # a mask was late: a later step verifies them
            return row.position - row.drafts
        right = max(0, len(result.tokens) - 1)
        if result.ended and right < row.drafts:  # perhaps by a guess: nothing was sampled after it
            right += row.tokens[right - row.drafts] == result.tokens[right]
        wrong = row.drafts - right
        seq.request.rejected += wrong
        seq.request.accepted += row.drafts - wrong
        self.metrics.add("rejected_tokens", wrong)
        self.metrics.add("drafted_tokens", row.drafts)
        return row.position - wrong

    def _end_failed(self, request: Request, message: str, now: float) -> None:
        """Nothing is charged if no token was delivered. What was delivered before stays charged, or
        an adapter that overflows at its last token would answer for nothing."""
        request.voided = not request.delivered
        self.metrics.add("not_finite")
        self.end_request(request, FinishReason.ERROR, now, message)

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
            wrong = bool(request.wrong_counts())
            request.voided = request.voided or wrong
            for seq in request.sequences:
                if seq.status is not SequenceStatus.FINISHED:
                    self._emit(seq, [], None, FinishReason.ERROR)
                    seq.status, seq.in_flight = SequenceStatus.FINISHED, 0
            self._settle(request, now, known_wrong=wrong)

    def _account(self, seq: Sequence, row: Row, end: int) -> None:
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
            self._count_discarded(seq, len(result.tokens))
            self.scheduler.waiting.refund(seq, self.config.output_price)
        if not seq.in_flight:
            self.scheduler.release(seq)
            self._settle(seq.request, now)

    def _count_discarded(self, seq: Sequence, count: int) -> None:
        seq.request.discarded += count
        self.metrics.add("discarded_tokens", count)

    def _take(self, seq: Sequence, row: Row, end: int, result: Sampled | None, now: float) -> None:
        """Accept the tokens of a row up to the first that ends the sequence."""
        if result is None:
            self._cache_filled_blocks(seq, row.start, end)
            return
        seq.pending -= 1
        if not result.tokens and result.embedding is None:  # its last position is computed again
            seq.computed = end - 1
            self.scheduler.waiting.refund(seq, self.config.output_price)
            return
        if row.drafts:
            seq.computed = end
            extra = len(result.tokens) - 1
            rate = self.config.output_price - self.config.prompt_price
            self.scheduler.waiting.charge(seq, extra * rate)
        tokens, reason = self._up_to_the_end(seq, result)
        if not tokens:  # only the prompt was asked for
            self.scheduler.waiting.refund(seq, self.config.output_price)
        self._count_discarded(seq, len(result.tokens) - len(tokens))
        seq.history.extend(tokens)
        self._cache_filled_blocks(seq, row.start, min(end, len(seq.history)))
        self._count_generated(seq, tokens, now)
        logprobs = None if result.logprobs is None else result.logprobs[: len(tokens)]
        self._emit(seq, tokens, logprobs, reason, result.embedding)
        if reason is not None:
            request = seq.request
            request.finish_reason = request.finish_reason or reason
            self.scheduler.stop(seq)
            self._settle(request, now)

    def _up_to_the_end(
        self, seq: Sequence, result: Sampled
    ) -> tuple[list[int], FinishReason | None]:
        if not seq.request.inputs.sampling.max_tokens:
            return [], FinishReason.LENGTH
        last = len(result.tokens)
        for count, token in enumerate(result.tokens, 1):
            reason = self._end_of(seq, token, seq.output_len + count)
            if result.ended and count == last:
                reason = FinishReason.STOP
            if reason is not None:
                return result.tokens[:count], reason
        return result.tokens, None

    def _cache_filled_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Enter the blocks that the positions from `start` to `end` filled in the prefix cache."""
        if not self.config.prefix_cache:
            return
        size = self.config.block_size
        if self.config.kv_heavy:  # positions of answers do not see all that others would
            end = min(end, seq.prompt_len)
        first, last = start // size, end // size
        if first >= last:
            return
        if len(seq.keys) < last:
            self.scheduler.keys.extend(seq, last)
        for index in range(first, last):
            parent = seq.keys[index - 1] if index else None
            owner = self.scheduler.keys.owner(seq, index)
            self.pool.cache(seq.blocks[index], seq.keys[index], owner, parent)

    def _count_generated(self, seq: Sequence, tokens: list[int], now: float) -> None:
        """Count the tokens that were appended to the history."""
        request, count = seq.request, len(tokens)
        request.generated += count
        self.metrics.counters["generated_tokens"] += count
        if request.inputs.adapter is not None:
            by_adapter = self.metrics.adapter_tokens
            adapter = request.inputs.adapter
            by_adapter[adapter] = by_adapter.get(adapter, 0) + count
        if request.first_token_at is None:
            request.first_token_at = now
            self.metrics.observe("first_token_seconds", now - request.arrived)
        elif seq.output_len > count:
            for _ in tokens:
                self.metrics.observe("inter_token_seconds", (now - seq.last_token_at) / count)
        seq.last_token_at = now

    def _end_of(self, seq: Sequence, token: int, length: int) -> FinishReason | None:
        """Whether a token ends the sequence as its output's token number `length`."""
        params = seq.request.inputs.sampling
        ended = token in params.stop_token_ids or (token in self.eos and not params.ignore_eos)
        if ended and length >= params.min_tokens:
            return FinishReason.STOP
        if length >= params.max_tokens or seq.prompt_len + length >= seq.request.limit:
            return FinishReason.LENGTH
        return None

    def _emit(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        reason: FinishReason | None,
        embedding: bytes | None = None,
    ) -> None:
        request = seq.request
        scores = None if seq.choice else request.take_scores()
        name = request.inputs.request_id
        chunk = TokenChunk(name, seq.choice, tokens, logprobs, reason, scores, embedding)
        if request.asked is not None:
            request.held.append(chunk)
        else:
            self._deliver(request, chunk)

    def _deliver(self, request: Request, chunk: TokenChunk) -> None:
        self.outboxes.setdefault(request.origin, Outbox()).chunks.append(chunk)
        request.delivered += len(chunk.tokens)
        self.metrics.counters["delivered_tokens"] += len(chunk.tokens)

    def _deliver_best(self, request: Request, asked: SamplingParams) -> None:
        for chunk in best_choices(request.held, asked, request.finish_reason):
            self._deliver(request, chunk)
        request.withheld = request.generated - request.delivered
        request.held = []

    def _settle(self, request: Request, now: float, *, known_wrong: bool = False) -> None:
        if request.settled or request.open or request.in_flight:
            return
        if request.asked is not None:
            self._deliver_best(request, request.asked)
        wrong = request.wrong_counts()
        if wrong and not known_wrong:
            raise IntegrityError(
                f"the receipt of {request.inputs.request_id} does not add up: {wrong} too many"
            )
        request.settled = True
        receipt = request.receipt(now)
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
