"""The grammar state of every constrained sequence, and the masks of a step.

The masks of a step are made in threads while the model computes its logits; llguidance releases the
interpreter's lock. A sequence whose mask is not ready in time has no token in that step and is
sampled by a later one, so that it does not delay the others.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from llguidance import LLExecutor, LLMatcher

from engine.batch import Row
from engine.decoding.grammar.compiler import GrammarCompiler
from engine.decoding.masks import Mask

_THREADS = 2
PATIENCE_S = 0.005  # how long a step waits for masks after its logits
_HOPELESS_S = 10.0  # after which a sequence without its mask ends


@dataclass(slots=True)
class _Work:
    """Masks in the making: of a sequence's next token, and of those after each guess."""

    future: "Future[None]"
    masks: Mask  # [1 + guesses, words]
    guesses: list[int]
    since: float


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    taken: int = 0  # output tokens that the matcher has consumed
    slow: bool = False  # its last mask was late: the next is made apart from the others'
    work: _Work | None = None


@dataclass(slots=True)
class MaskGroup:
    """Consecutive rows of one sequence: its next token and those after each guess."""

    state: _State
    rows: list[int]
    guesses: list[int]


@dataclass(slots=True)
class StepMasks:
    """What a step may sample."""

    index: list[int] = field(default_factory=list)  # rows that have a mask
    masks: list[Mask] = field(default_factory=list)
    late: set[int] = field(default_factory=set)  # rows to be computed again
    errors: dict[int, str] = field(default_factory=dict)  # by row


class Matchers:
    def __init__(self, compiler: GrammarCompiler, vocab: int) -> None:
        self._compiler = compiler
        self._words = -(-vocab // 32)
        self._states: dict[int, _State] = {}
        self._executor = LLExecutor(num_threads=_THREADS)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="masks")

    def begin(self, rows: list[Row]) -> list[MaskGroup]:
        """Start on the masks of the rows that have a grammar."""
        groups: list[MaskGroup] = []
        seq = -1
        for n, row in enumerate(rows):
            if row.sampling.grammar is None:
                continue
            if groups and row.seq == seq:
                groups[-1].rows.append(n)
                groups[-1].guesses.append(row.history[row.position - 1])
                continue
            seq = row.seq
            groups.append(MaskGroup(self._state_of(row), [n], []))
        fresh = [group for group in groups if self._needs_work(group)]
        self._make([group for group in fresh if not group.state.slow])
        for group in fresh:
            if group.state.slow:
                self._make([group])
        return groups

    def finish(self, groups: list[MaskGroup], patience_s: float | None) -> StepMasks:
        """Wait for the masks, or for as long as `patience_s`."""
        step = StepMasks()
        wait([group.state.work.future for group in groups if group.state.work], patience_s)
        for group in groups:
            state, work = group.state, group.state.work
            assert work is not None
            if not work.future.done() or work.guesses != group.guesses:
                state.slow = True
                step.late.update(group.rows)
                if monotonic() - work.since > _HOPELESS_S:
                    step.errors[group.rows[0]] = "the grammar's next step takes too long"
                continue
            state.work, state.slow = None, False
            failure = work.future.exception()
            if failure is not None or state.matcher.is_error():
                lines = (str(failure or "") or state.matcher.get_error()).splitlines()
                step.errors[group.rows[0]] = f"the grammar cannot be followed: {lines[:1]}"
            step.index += group.rows
            step.masks += list(work.masks)
        return step

    def accept(self, row: Row, tokens: list[int]) -> int | None:
        """Consume the sampled tokens. After how many of them the grammar allows nothing more, if
        that is so."""
        state = self._states.get(row.seq)
        if state is None or state.work is not None:
            return None
        for count, token in enumerate(tokens, 1):
            state.taken += state.matcher.try_consume_tokens([token])
            if state.matcher.is_stopped() and not state.matcher.is_error():
                return count
        return None

    def forget(self, seq: int) -> None:
        self._states.pop(seq, None)

    def _state_of(self, row: Row) -> _State:
        """The sequence's state, after the output that precedes the row."""
        state = self._states.get(row.seq)
        if state is None:
            assert row.sampling.grammar is not None
            state = _State(self._compiler.matcher(row.sampling.grammar))
            self._states[row.seq] = state
        outputs = row.position - row.prompt_len
        if state.taken != outputs and (state.work is None or state.work.future.done()):
            if state.taken > outputs:
                state.matcher.reset()
                state.taken = 0
            missing = row.history[row.prompt_len + state.taken : row.position]
            state.taken += state.matcher.try_consume_tokens(missing)
            state.work = None
        return state

    def _needs_work(self, group: MaskGroup) -> bool:
        work = group.state.work
        if work is not None and work.future.done() and work.guesses != group.guesses:
            work = group.state.work = None
        return work is None

    def _make(self, groups: list[MaskGroup]) -> None:
        if not groups:
            return
        masks = np.full((sum(len(group.rows) for group in groups), self._words), -1, np.int32)
        items, at = [], 0
        for group in groups:
            items.append((group.state.matcher, at, group.guesses))
            at += len(group.rows)
        future = self._threads.submit(self._fill, items, masks)
        now, at = monotonic(), 0
        for group in groups:
            made = masks[at : at + len(group.rows)]
            group.state.work = _Work(future, made, group.guesses, now)
            at += len(group.rows)

    def _fill(self, items: list[tuple[LLMatcher, int, list[int]]], masks: Mask) -> None:
        where = masks.ctypes.data, 4 * self._words, len(masks)
        plain = [(matcher, at) for matcher, at, guesses in items if not guesses]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        guessed = [item for item in items if item[2]]
        if guessed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)
