"""Fills one step's token budget: decoding sequences first, then chunks of prompts in fair order.

There are no separate prefill and decode phases: each step computes positions of a sequence until
its count of computed positions reaches the length of its history.
"""

from collections import deque

from engine.adapter import Lack
from engine.adapters import Adapters
from engine.batch import LAST_SAMPLED, Row, StepBatch
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import IntegrityError
from engine.metrics import Metrics
from engine.preemption import Pace, choose_victim
from engine.prefix import PUBLIC, PrefixNames
from engine.sequence import Request, Sequence, Stage
from engine.waiting import Waiting

BYPASSES = 8  # admissions that may bypass a request which lacks blocks before all wait for it


class NeedsCollect(Exception):
    """Memory is short while a step is in flight: collect that step, then schedule again."""


class Scheduler:
    """Owns the running sequences, the queue and their blocks. Independent of the device."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        names: PrefixNames,
        adapters: Adapters,
        waiting: Waiting,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._pool = pool
        self._names = names
        self._adapters = adapters
        self._metrics = metrics
        self._size = config.block_size
        self.rows: list[tuple[Sequence, Row]] = []  # the batch that was scheduled last
        self._copies: list[tuple[int, int]] = []
        self._budget = 0
        self._next_number = 0
        self._reserved = 0  # choices that running requests add when they fork
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.pace = Pace()

    # Life of a sequence.

    def new_sequence(self, request: Request, choice: int) -> Sequence:
        self._next_number += 1
        prompt = list(request.ask.prompt)
        seq = Sequence(self._next_number, request, choice, prompt, len(prompt))
        request.sequences.append(seq)
        return seq

    def submit(self, request: Request) -> None:
        seq = self.new_sequence(request, 0)
        if self._config.prefix_cache:
            request.public_blocks = self._names.public_blocks(request.ask.prompt)
            self.name_blocks(seq)
        self.waiting.push(seq, lift=True)

    def name_blocks(self, seq: Sequence) -> None:
        """Compute the missing keys of the sequence's full blocks."""
        ask = seq.request.ask
        self._names.extend(
            seq.keys, seq.history, ask.namespace, ask.adapter, seq.request.public_blocks
        )

    def owner_of(self, seq: Sequence, index: int) -> str:
        return PUBLIC if index < seq.request.public_blocks else seq.request.ask.namespace

    def stop(self, seq: Sequence) -> None:
        """End the sequence. Its blocks are released at once, or when its last step is collected."""
        if seq.stage is Stage.WAITING:
            self.waiting.remove(seq, Stage.OVER)
        elif seq.stage is Stage.RUNNING:
            seq.stage = Stage.OVER
            self.running.remove(seq)
            if not seq.request.forked:
                self._reserved -= self._extra_choices(seq)
                seq.request.forked = True
            if not seq.in_flight:
                self.release(seq)

    def release(self, seq: Sequence) -> None:
        if self._copies:
            self._copies = [(a, b) for a, b in self._copies if b not in seq.blocks]
        self._pool.release(reversed(seq.blocks))
        seq.blocks = []
        if seq.handle is not None:
            self._adapters.release(seq.handle)
            seq.handle = None

    # One step.

    def schedule(self, now: float) -> StepBatch | None:
        """The batch of the next step, or None when nothing can run now."""
        self.rows = []
        self._budget = self._config.max_batch_tokens
        self._yield_to_priority(now)
        self._secure_blocks(now)
        for seq in self.running:
            if seq.decoding and not self._complete(seq):
                self._add_row(seq, 1)
        self._fill(now)
        self._adapters.drain_for_waiting(now)
        if not self.rows:
            return None
        self.rows.sort(key=lambda pair: len(pair[1].tokens) > 1)  # stable: decode rows first
        copies, self._copies = self._copies, []
        return StepBatch([row for _, row in self.rows], copies)

    def _complete(self, seq: Sequence) -> bool:
        """Whether the token still on the device reaches the length limit: nothing to launch."""
        length = len(seq.history) + seq.pending
        return (
            length - seq.prompt_len >= seq.request.ask.sampling.max_tokens
            or length >= seq.request.limit
        )

    def _secure_blocks(self, now: float) -> None:
        """Give every running sequence the blocks of its next row, preempting others if needed."""
        for seq in list(self.running):
            if seq.remaining == 0 or (seq.pending and self._complete(seq)):
                continue
            while seq.stage is Stage.RUNNING and not self._ensure_blocks(seq):
                if self._adapters.evict_idle():
                    continue
                if any(other.in_flight for other in self.running):
                    raise NeedsCollect
                self._preempt(choose_victim(self.running, self.waiting, self.pace, now))

    def _yield_to_priority(self, now: float) -> None:
        """Preempt running sequences of a lower priority for a waiting one that does not fit."""
        first = self.waiting.first_turn()
        if first is None or all(s.request.ask.priority >= -first[0] for s in self.running):
            return
        slot_to_have = self._adapters.slot_to_have()
        needed = next(
            self.waiting.candidates(lambda a: self._adapters.usable(a, slot_to_have), self._hits),
            None,
        )
        if needed is None:
            return
        priority = needed.request.ask.priority
        lower = [s for s in self.running if s.request.ask.priority < priority]
        if not self._enough(needed, lower):
            return
        while lower and not self._enough(needed, []):
            if any(seq.in_flight for seq in self.running):
                raise NeedsCollect
            victim = choose_victim(lower, self.waiting, self.pace, now)
            lower.remove(victim)
            self._preempt(victim)

    def _enough(self, seq: Sequence, given_up: list[Sequence]) -> bool:
        """Whether a waiting sequence fits after the sequences in `given_up` are preempted."""
        need = -(-len(seq.history) // self._size) - self._hits(seq) + self._margin()
        blocks = self._pool.available(seq.request.ask.namespace)
        blocks += self._pool.freed_by(other.blocks for other in given_up)
        return self._seats_lacking(seq) <= len(given_up) and blocks >= need

    def _seats_lacking(self, seq: Sequence) -> int:
        choices = 1 if seq.request.forked else seq.request.ask.sampling.n
        return len(self.running) + self._reserved + choices - self._config.max_running

    def _margin(self) -> int:
        """Blocks to leave free for the running sequences: without them an admission would lead to
        a preemption in one of the next steps."""
        return len(self.running) // 4 + 1 if self.running else 0

    def _ensure_blocks(self, seq: Sequence) -> bool:
        """Provide writable blocks for the positions that the next row writes. False if too few
        are available."""
        tenant = seq.request.ask.namespace
        force = len(self.running) == 1
        first = seq.computed // self._size
        if first < len(seq.blocks) and not self._pool.writable(seq.blocks[first]):
            fresh = self._pool.allocate(1, tenant, force)
            if fresh is None:
                return False
            self._copies.append((seq.blocks[first], fresh[0]))
            self._pool.release([seq.blocks[first]])
            seq.blocks[first] = fresh[0]
        length = len(seq.history) + seq.pending
        lacking = -(-length // self._size) - len(seq.blocks)
        if lacking > 0:
            fresh = self._pool.allocate(lacking, tenant, force)
            if fresh is None:
                return False
            seq.blocks.extend(fresh)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Release the sequence's blocks; it later recomputes what the cache has evicted by then."""
        self.running.remove(seq)
        if not seq.request.forked:
            self._reserved -= self._extra_choices(seq)
        self.release(seq)
        seq.computed = 0
        self._metrics.add("preemptions")
        self.waiting.push(seq, lift=False)

    def _fill(self, now: float) -> None:
        """Schedule prompt chunks of running sequences and new admissions, in fair order."""
        partial = [s for s in self.running if s.remaining > 0 and not s.decoding]
        unfinished = deque(sorted(partial, key=self.waiting.turn))
        admitting = True
        while self._budget > 0 and (unfinished or admitting):
            if unfinished and not (admitting and self._newcomer_first(unfinished[0])):
                self._chunk(unfinished.popleft())
                continue
            seq = self._admit_next(now)
            if seq is None:
                admitting = False
            elif seq.decoding:
                self._add_row(seq, 1)
            else:
                self._chunk(seq)

    def _newcomer_first(self, seq: Sequence) -> bool:
        first = self.waiting.first_turn()
        return first is not None and first < self.waiting.turn(seq)[:2]

    def _chunk(self, seq: Sequence) -> None:
        self._add_row(seq, min(self._budget, seq.remaining))
        if seq.computed >= seq.prompt_len and not seq.request.forked:
            self._fork(seq)

    def _add_row(self, seq: Sequence, count: int) -> None:
        start, end = seq.computed, seq.computed + count
        sample = end == len(seq.history) + seq.pending
        if seq.handle is not None:
            self._adapters.check(seq.handle)
        row = Row(
            seq=seq.number,
            tokens=[LAST_SAMPLED] if seq.pending else seq.history[start:end],
            start=start,
            blocks=seq.blocks[: -(-end // self._size)],
            adapter=seq.handle,
            sample=sample,
            sampling=seq.request.ask.sampling,
            choice=seq.choice,
            history=seq.history,
            prompt_len=seq.prompt_len,
        )
        self.waiting.charge(seq, self.cost_of(seq, row))
        seq.computed = end
        seq.in_flight += 1
        seq.pending = int(sample)
        self._budget -= count
        self.rows.append((seq, row))

    def cost_of(self, seq: Sequence, row: Row) -> float:
        """The row's cost in fairness units; tokens recomputed after a preemption cost nothing."""
        if row.start >= seq.prompt_len:
            return row.sample * self._config.output_price
        end = row.start + len(row.tokens)
        fresh = max(0, min(end, seq.prompt_len) - max(row.start, seq.high))
        return fresh * self._config.prompt_price + row.sample * self._config.output_price

    # Admission.

    def _admit_next(self, now: float) -> Sequence | None:
        """Admit the first waiting sequence, in fair order, that fits now."""
        if len(self.running) + self._reserved >= self._config.max_running:
            return None
        passed: list[Sequence] = []

        slot_to_have = self._adapters.slot_to_have()

        def usable(digest: str | None) -> bool:
            ready = self._adapters.usable(digest, slot_to_have)
            if not ready and digest is not None:
                self._adapters.want(digest, now)
            return ready

        for seq in self.waiting.candidates(usable, self._hits):
            lack = self._admit(seq, now)
            if lack is None:
                for other in passed:
                    other.bypassed += 1
                return seq
            if lack in (Lack.BLOCKS, Lack.SEATS):
                passed.append(seq)
                if seq.bypassed >= BYPASSES or len(passed) >= BYPASSES:
                    return None
        return None

    def _hits(self, seq: Sequence) -> int:
        """The number of leading blocks that are cached and that the sequence may use."""
        limit = (len(seq.history) - 1) // self._size  # the last token is always computed
        if seq.request.cached is not None:
            # The cached count is frozen: blocks cached by others since then are not used.
            limit = min(limit, seq.high // self._size)
        return self._pool.hits(seq.keys, limit)

    def _admit(self, seq: Sequence, now: float) -> Lack | None:
        """Admit a waiting sequence with its slot, blocks and cached prefix; returns what it lacks
        otherwise."""
        ask = seq.request.ask
        if seq.in_flight or self._seats_lacking(seq) > 0:
            return Lack.SEATS
        hits = self._hits(seq)
        need = -(-len(seq.history) // self._size) - hits
        spare = need + self._margin()
        force = not self.running
        seq.blocks = self._share(seq.keys[:hits])
        if ask.adapter is not None:
            handle = self._adapters.acquire(ask.adapter, spare, force)
            if isinstance(handle, Lack):
                self._adapters.want(ask.adapter, now)
                self.release(seq)
                return handle
            seq.handle = handle
        while self._pool.available(ask.namespace, force) < spare and self._adapters.evict_idle():
            pass
        fresh = None
        if self._pool.available(ask.namespace, force) >= spare:
            fresh = self._pool.allocate(need, ask.namespace, force)
        if fresh is None:
            self.release(seq)
            return Lack.BLOCKS
        seq.blocks += fresh
        seq.computed = hits * self._size
        self._count_admission(seq, now)
        self.waiting.remove(seq, Stage.RUNNING)
        self.running.append(seq)
        if not seq.request.forked:
            self._reserved += self._extra_choices(seq)
        return None

    def _share(self, keys: list[bytes]) -> list[int]:
        blocks = []
        for key in keys:
            block = self._pool.find(key)
            if block is None:
                raise IntegrityError("a cached block was removed between look-up and use")
            self._pool.share(block)
            blocks.append(block)
        return blocks

    def _count_admission(self, seq: Sequence, now: float) -> None:
        request = seq.request
        if request.cached is not None:
            return
        request.cached = seq.high = seq.computed
        request.admitted_at = now
        self.waiting.charge(seq, seq.computed * self._config.cached_price)
        self._metrics.add("prefix_queries", len(request.ask.prompt))
        self._metrics.add("prefix_hits", seq.computed)

    def _extra_choices(self, seq: Sequence) -> int:
        return seq.request.ask.sampling.n - 1

    def _fork(self, parent: Sequence) -> None:
        """The other choices share the prompt's blocks and compute its last token again to sample
        a first token of their own; a block that they write is copied first."""
        request = parent.request
        request.forked = True
        self._reserved -= self._extra_choices(parent)
        shared = parent.blocks[: -(-parent.prompt_len // self._size)]
        for choice in range(1, request.ask.sampling.n):
            child = self.new_sequence(request, choice)
            child.history = parent.history[: parent.prompt_len]
            child.keys = list(parent.keys)
            child.blocks = list(shared)
            for block in shared:
                self._pool.share(block)
            child.computed = parent.prompt_len - 1
            child.high = parent.prompt_len
            if parent.handle is not None:
                self._adapters.hold(parent.handle)
                child.handle = parent.handle
            child.stage = Stage.RUNNING
            self.running.append(child)
