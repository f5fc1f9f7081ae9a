"""Fills one step's token budget: decoding sequences first, then chunks of prompts in fair order.

There are no separate prefill and decode phases: each step computes positions of a sequence until
its count of computed positions reaches the length of its history.
"""

from collections import Counter, deque

from engine.adapters.adapter import Shortage
from engine.adapters.registry import AdapterRegistry
from engine.batch import LAST_SAMPLED, Drafter, Row, StepBatch
from engine.cache.blocks import BlockPool
from engine.cache.prefix import PrefixHasher
from engine.config import EngineConfig
from engine.metrics import Metrics
from engine.model_spec import Sight
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.capacity import Capacity
from engine.scheduling.cost import row_cost
from engine.scheduling.eviction import eviction_of
from engine.scheduling.preemption import StepTiming, choose_victim
from engine.scheduling.sequence import Request, Sequence, SequenceStatus
from engine.scheduling.sequence_keys import SequenceKeys
from engine.scheduling.shares import Shares
from engine.scheduling.speculation import Forced, Guesses, Speculation
from engine.scheduling.waiting import WaitingQueue

MAX_SCORED = 256  # prompt tokens that a step scores: each has the logits of a whole vocabulary
MAX_BYPASSES = 8  # admissions that may bypass a request which lacks blocks before all wait for it
MAX_LACKING = 2  # sequences of a tenant that are tried though another one of it lacks blocks
MAX_CLAIMS = 16  # tenants that a step tries to give their share


class NeedsCollect(Exception):
    """Memory is short while a step is in flight: collect that step, then schedule again."""


class Scheduler:
    """Owns the running sequences, the queue and their blocks. Independent of the device."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        hasher: PrefixHasher,
        adapters: AdapterRegistry,
        waiting: WaitingQueue,
        metrics: Metrics,
        *,
        sight: Sight | None = None,
        drafter: Drafter | None = None,
        forced: Forced | None = None,
    ) -> None:
        """`sight`: the positions that any layer sees; None: all."""
        self._config = config
        self._pool = pool
        self.eviction = eviction_of(config)
        self.keys = SequenceKeys(hasher, pool, enabled=config.prefix_cache, eviction=self.eviction)
        self._adapters = adapters
        self._metrics = metrics
        self._size = config.block_size
        sight = sight or Sight()
        self.rows: list[tuple[Sequence, Row]] = []  # the batch that was scheduled last
        self.begun: list[Request] = []  # admitted for the first time since it was last emptied
        self._budget = 0
        self._scoring = 0  # prompt tokens that this step may still score
        self._next_number = 0
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.capacity = Capacity(config, pool, adapters, self.keys, self.running, sight)
        self.tables = BlockTables(config, pool, self.capacity, sight, self.eviction)
        self.shares = Shares(config, self.running, waiting, pool.num_blocks)
        self.timing = StepTiming()
        self.speculation = Speculation(config, drafter, forced)

    # Life of a sequence.

    def new_sequence(self, request: Request, choice: int) -> Sequence:
        self._next_number += 1
        prompt = list(request.inputs.prompt)
        seq = Sequence(self._next_number, request, choice, prompt, len(prompt))
        request.sequences.append(seq)
        return seq

    def submit(self, request: Request) -> None:
        seq = self.new_sequence(request, 0)
        if self.eviction is not None:
            self.eviction.begin(request)
        self.keys.begin(seq)
        self.waiting.push(seq, lift=True, running=self.running)

    def stop(self, seq: Sequence) -> None:
        """End the sequence. Its blocks are released at once, or when its last step is collected."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq, SequenceStatus.FINISHED)
        elif seq.status is SequenceStatus.RUNNING:
            seq.status = SequenceStatus.FINISHED
            self.running.remove(seq)
            seq.request.forked = True
            if not seq.in_flight:
                self.release(seq)

    def release(self, seq: Sequence) -> None:
        self.tables.release(seq)
        if seq.handle is not None:
            self._adapters.release(seq.handle)
            seq.handle = None

    # One step.

    def schedule(self, now: float) -> StepBatch | None:
        """The batch of the next step, or None when nothing can run now."""
        self.rows = []
        self.keys.begin_step(idle=not self.running)
        self._budget = self.timing.budget(self._config.step_s, self._config.max_batch_tokens)
        self._scoring = MAX_SCORED
        if self.eviction is not None and self.eviction.choosing(self.running):
            raise NeedsCollect
        self._preempt_for_priority(now)
        self._preempt_for_shares(now)
        self._secure_blocks(now)
        decoding = [seq for seq in self.running if seq.decoding and not self._complete(seq)]
        guesses = self._guesses(decoding)
        for seq in decoding:
            self._add_row(seq, 1, guesses.get(seq.number))
        self._fill(now)
        self._adapters.drain_for_waiting(now)
        if not self.rows:
            return None
        self.rows.sort(key=lambda pair: len(pair[1].tokens) > 1)  # stable: decode rows first
        return StepBatch([row for _, row in self.rows], *self.tables.take_copies())

    def _guesses(self, decoding: list[Sequence]) -> Guesses:
        """None where prompts wait for the step's budget: a guess must not delay them."""
        if self.waiting.size or any(seq.remaining > 0 and not seq.decoding for seq in self.running):
            return {}
        room = min(self._budget, self._config.max_running) - len(decoding)
        guesses = self.speculation.guesses(decoding, room, self.timing.token_s)
        for seq in decoding if guesses else ():
            wanted = len(guesses.get(seq.number, ()))
            if wanted and not self.tables.lend(seq, wanted, len(self.running)):
                del guesses[seq.number]
        return guesses

    def _complete(self, seq: Sequence) -> bool:
        """Whether the token still on the device reaches the length limit: nothing to launch."""
        length = len(seq.history) + seq.pending
        return (
            length - seq.prompt_len >= seq.request.inputs.sampling.max_tokens
            or length >= seq.request.limit
        )

    def _secure_blocks(self, now: float) -> None:
        """Give every running sequence the blocks of its next row, preempting others if needed."""
        for seq in list(self.running):
            if seq.remaining <= 0 or (seq.pending and self._complete(seq)):
                continue
            while seq.status is SequenceStatus.RUNNING and not self._ensure_blocks(seq):
                if self._adapters.evict_idle():
                    continue
                if any(other.in_flight for other in self.running):
                    raise NeedsCollect
                victims = self.shares.first_to_give_blocks()
                self._preempt(choose_victim(victims, self.waiting, self.timing, now))

    def _preempt_for_priority(self, now: float) -> None:
        """Preempt running sequences of a lower priority for a waiting one that does not fit."""
        first = self.waiting.first_sort_key()
        if first is None or all(s.request.inputs.priority >= -first[0] for s in self.running):
            return
        needed = next(self.waiting.candidates(self._adapters.loadable, self.keys.hits), None)
        if needed is None:
            return
        priority = needed.request.inputs.priority
        lower = [s for s in self.running if s.request.inputs.priority < priority]
        if not self.capacity.would_fit(needed, lower):
            return
        while lower and not self.capacity.would_fit(needed, []):
            if any(seq.in_flight for seq in self.running):
                raise NeedsCollect
            lacks_slot = self._adapters.room(needed.request.inputs.adapter, []) is None
            victims = self.capacity.slot_holders(lower) if lacks_slot else lower
            victim = choose_victim(victims, self.waiting, self.timing, now)
            lower.remove(victim)
            self._preempt(victim)

    def _preempt_for_shares(self, now: float) -> None:
        """Admit waiting sequences of tenants below their share in place of those of tenants above
        theirs, where their turn does not come."""
        for tenant in self.shares.starved(now)[:MAX_CLAIMS]:
            seq = self.waiting.oldest(tenant, self._adapters.loadable)
            while seq is not None and not seq.in_flight and self._take_share(seq, now):
                seq = self.waiting.oldest(tenant, self._adapters.loadable)

    def _take_share(self, seq: Sequence, now: float) -> bool:
        """Whether it was admitted, and another one of its tenant may be tried."""
        hits = self.keys.hits(seq)
        if self.keys.unfinished(seq, hits) or self.capacity.would_fit(seq, []):
            return False
        need = self._blocks_for(seq)
        leaving = self._replaced_by(seq, need)
        if not leaving or not self.capacity.would_fit(seq, leaving):
            return False
        if any(other.in_flight for other in self.running):
            raise NeedsCollect
        while not self.capacity.would_fit(seq, []):
            victims = self._replaced_by(seq, need)
            if not victims:
                break
            self._preempt(choose_victim(victims, self.waiting, self.timing, now))
        if self._admit(seq, now) is None:
            return True
        self.shares.note_turn(seq, now)
        return False

    def _blocks_for(self, seq: Sequence) -> int:
        return self.capacity.blocks_for(seq, self.keys.hits(seq) * self._size)

    def _replaced_by(self, seq: Sequence, need: int) -> list[Sequence]:
        """The running sequences of which one must leave for `seq`, by what it lacks first."""
        if self.capacity.missing_places() > 0:
            return self.shares.place_holders(seq)
        if self._adapters.room(seq.request.inputs.adapter, []) is None:
            return self.capacity.slot_holders(self.shares.slot_holders(seq))
        return self.shares.block_holders(seq, need)

    def _ensure_blocks(self, seq: Sequence) -> bool:
        return self.tables.ensure(seq, force=len(self.running) == 1)

    def _preempt(self, seq: Sequence) -> None:
        """Release the sequence's blocks; it later recomputes what the cache has evicted by then."""
        self.running.remove(seq)
        self.release(seq)
        seq.computed = 0
        self._metrics.add("preemptions")
        self.waiting.push(seq, lift=False)

    def _fill(self, now: float) -> None:
        """Schedule prompt chunks of running sequences and new admissions, in fair order."""
        prefilling = [s for s in self.running if s.remaining > 0 and not s.decoding]
        unfinished = deque(sorted(prefilling, key=self.waiting.sort_key))
        admitting = True
        while self._budget > 0 and (unfinished or admitting):
            if unfinished and not (admitting and self._admit_before(unfinished[0])):
                self._chunk(unfinished.popleft())
                continue
            seq = self._admit_next(now)
            if seq is None:
                admitting = False
            elif seq.decoding:
                self._add_row(seq, 1)
            else:
                self._chunk(seq)

    def _admit_before(self, seq: Sequence) -> bool:
        first = self.waiting.first_sort_key()
        return first is not None and first < self.waiting.sort_key(seq)[:2]

    def _chunk(self, seq: Sequence) -> None:
        count = min(self._budget, seq.remaining, len(seq.blocks) * self._size - seq.computed)
        if seq.request.unscored:
            count = min(count, self._scoring)
            self._scoring -= count
        if not count:
            return  # its turn comes in the next step
        count = self.tables.covered(seq, count)
        self._add_row(seq, count)
        if seq.computed >= seq.prompt_len and not seq.request.forked:
            self._fork(seq)

    def _add_row(self, seq: Sequence, count: int, guesses: list[int] | None = None) -> None:
        """A row of the next `count` tokens, and of `guesses` for those that may follow them."""
        guesses = guesses or []
        known = seq.computed + count
        start, end = seq.computed, known + len(guesses)
        sample = known == len(seq.history) + seq.pending
        if seq.handle is not None:
            self._adapters.check(seq.handle)
        row = Row(
            seq=seq.number,
            tokens=([LAST_SAMPLED] if seq.pending else seq.history[start:known]) + guesses,
            start=start,
            blocks=seq.blocks,
            adapter=seq.handle,
            sample=sample,
            sampling=seq.request.inputs.sampling,
            choice=seq.choice,
            history=seq.history,
            prompt_len=seq.prompt_len,
            drafts=len(guesses),
            table_version=seq.table_version,
            answer=None if self.eviction is None else self.eviction.answer_of(seq.request),
            observed=None if self.eviction is None else self.eviction.observed(seq),
            scored=max(0, min(known, seq.prompt_len - 1) - start) if seq.request.unscored else 0,
        )
        self.waiting.charge(seq, row_cost(seq, row, self._config))
        seq.computed = end
        seq.in_flight += 1
        seq.pending += int(sample)
        self._budget -= count + len(guesses)
        self.rows.append((seq, row))

    # Admission.

    def _admit_next(self, now: float) -> Sequence | None:
        """Admit the first waiting sequence, in fair order, that fits now."""
        if self.capacity.missing_places() > 0:
            return None
        skipped: list[Sequence] = []
        lacking: Counter[str] = Counter()  # sequences that lack blocks, by tenant

        slot_available = self._adapters.slot_available()

        def usable(digest: str | None) -> bool:
            ready = self._adapters.usable(digest, slot_available)
            if not ready and digest is not None:
                self._adapters.note_slot_wait(digest, now)
            return ready

        for seq in self.waiting.candidates(usable, self.keys.hits):
            tenant = seq.request.inputs.namespace
            if lacking[tenant] >= MAX_LACKING:
                continue
            shortage = self._admit(seq, now)
            if shortage is None:
                for other in skipped:
                    other.bypassed += 1
                self.shares.note_turn(seq, now)
                return seq
            if shortage is Shortage.BLOCKS:
                lacking[tenant] += 1
                if not self.shares.may_take_blocks(seq, self._blocks_for(seq)):
                    continue  # what its tenant holds must come back first: nobody waits for that
                skipped.append(seq)
                if seq.bypassed >= MAX_BYPASSES or len(skipped) >= MAX_BYPASSES:
                    return None
        return None

    def _admit(self, seq: Sequence, now: float) -> Shortage | None:
        """Admit a waiting sequence with its slot, blocks and cached prefix; returns what it lacks
        otherwise."""
        inputs = seq.request.inputs
        if seq.in_flight or self.capacity.missing_places() > 0:
            return Shortage.RUNNING_SLOTS
        hits = self.keys.hits(seq)
        if self.keys.unfinished(seq, hits):
            return Shortage.KEYS
        start = hits * self._size
        need = self.capacity.blocks_for(seq, start) - hits
        spare = self.capacity.whole(need, hits) + self.capacity.margin()
        force = not self.running
        if not self.capacity.may_fit(seq, hits, spare, force):
            if inputs.adapter is not None:
                self._adapters.note_slot_wait(inputs.adapter, now)
            return Shortage.BLOCKS
        seq.blocks = self.keys.share(seq, hits)
        self.tables.share_parts(seq, start)
        self.tables.release_unread(seq, start)
        if inputs.adapter is not None:
            handle = self._adapters.acquire(inputs.adapter, spare, force)
            if isinstance(handle, Shortage):
                self._adapters.note_slot_wait(inputs.adapter, now)
                self.release(seq)
                return handle
            seq.handle = handle
        while self._pool.available(inputs.namespace, force) < spare and self._adapters.evict_idle():
            pass
        fresh = None
        if self._pool.available(inputs.namespace, force) >= spare:
            fresh = self._pool.allocate(need, inputs.namespace, force, bare=True)
        seq.blocks += fresh or ()
        if fresh is None or not self.tables.cover(seq, start + 1, force):
            self.release(seq)
            return Shortage.BLOCKS
        seq.computed = start
        self._count_admission(seq, now)
        self.waiting.remove(seq, SequenceStatus.RUNNING)
        self.running.append(seq)
        return None

    def _count_admission(self, seq: Sequence, now: float) -> None:
        request = seq.request
        if request.cached is not None:
            return
        request.cached = request.reached = seq.counted_until = seq.computed
        request.admitted_at = now
        self.begun.append(request)
        self.waiting.charge(seq, seq.computed * self._config.cached_price)
        self._metrics.add("prefix_queries", len(request.inputs.prompt))
        self._metrics.add("prefix_hits", seq.computed)

    def _fork(self, parent: Sequence) -> None:
        """The other choices share the prompt's blocks and compute its last token again to sample
        a first token of their own; a block that they write is copied first. Choices beyond the free
        places, or beyond the tenant's share of them while others wait, wait as if they were preempted.
        """
        request = parent.request
        begun = self.shares.choices_at_once(parent)
        request.forked = True
        shared = parent.blocks[: -(-parent.prompt_len // self._size)]
        for choice in range(1, request.inputs.sampling.n):
            child = self.new_sequence(request, choice)
            child.history = parent.history[: parent.prompt_len]
            child.keys = list(parent.keys)
            child.counted_until = parent.prompt_len
            if choice >= begun:
                self.waiting.push(child, lift=False)
                continue
            child.blocks, child.unheld = list(shared), parent.unheld
            for block in child.held_blocks:
                self._pool.share(block)
            child.computed = parent.prompt_len - 1
            self.tables.share_parts(child, child.computed)
            if parent.handle is not None:
                self._adapters.retain(parent.handle)
                child.handle = parent.handle
            child.status = SequenceStatus.RUNNING
            self.running.append(child)
