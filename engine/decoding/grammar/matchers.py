"""The grammar state of every constrained sequence, and the masks of a step.

Masks are made in threads while the model computes its logits; llguidance releases the interpreter's
lock. Those of sequences whose masks take microseconds are one job of a thread of their own, if there are
several and a core that the model leaves free; otherwise they are made at once, because threads take
longer to wake up. A sequence whose mask is not ready in time has no token in that step and is sampled
by a later one, so that it does not delay the others.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import monotonic, perf_counter, thread_time

import numpy as np
from llguidance import LLExecutor, LLMatcher

from engine.batch import Row
from engine.decoding.grammar.compiler import Compiled, GrammarCompiler
from engine.decoding.masks import Masks
from engine.protocol import Grammar

_THREADS = 2
PATIENCE_S = 0.005  # how long a step waits for masks after its logits
_HOPELESS_S = 10.0  # after which a sequence without its mask ends
_QUICK_S = 0.0001  # longer than this: a sequence's next masks are left to the threads
_RESTS = 1, 8, 64  # how many: first, after one that took long, and at most
_SLOW_S = 0.002  # more processor time than this: all masks of the grammar are left to the threads
_AT_ONCE_S = 0.0005  # after which a step leaves all others to the threads
_SEVERAL = 4  # masks that are worth waking a thread for
_ALONE = 64  # steps without that thread, after one in which it was late
_LONG = (
    512  # a grammar that forces more tokens, which takes a millisecond to find, is not asked again
)
_REMEMBERED = 128  # such grammars, and slow ones


@dataclass(slots=True)
class _Work:
    """Masks in the making: of the next tokens of some sequences, and of those after each guess."""

    masks: Masks
    since: float
    future: "Future[None] | None" = None  # None: made
    quick: "list[MaskGroup]" = field(default_factory=list)  # made by the thread of quick masks


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    grammar: Grammar
    compiled: Compiled
    taken: int = 0  # output tokens that the matcher has consumed
    slow: bool = False  # its last mask was late: the next is made apart from the others'
    rest: int = _RESTS[0]  # masks that are left to the threads
    rests: int = _RESTS[1]
    quick: bool = False  # as its last mask that was made at once
    work: _Work | None = None
    guesses: list[int] = field(default_factory=list)  # that `work` follows
    at: int = 0  # the first of its masks in `work`


@dataclass(slots=True)
class MaskGroup:
    """Consecutive rows of one sequence: its next token and those after each guess."""

    state: _State
    row: Row  # the first of them
    rows: list[int]
    guesses: list[int]


@dataclass(slots=True)
class StepMasks:
    """What a step may sample."""

    index: list[int] = field(default_factory=list)  # rows that have a mask
    masks: Masks | None = None  # of these rows; None without any
    late: set[int] = field(default_factory=set)  # rows to be computed again
    errors: dict[int, str] = field(default_factory=dict)  # by row


class Matchers:
    def __init__(self, compiler: GrammarCompiler, vocab: int, *, spare: bool = False) -> None:
        """spare: whether the model leaves a core free."""
        self._compiler = compiler
        self._words = -(-vocab // 32)
        self._states: dict[int, _State] = {}
        self._executor = LLExecutor(num_threads=_THREADS)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="masks")
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="quick-masks") if spare else None
        self._quick_executor = LLExecutor(num_threads=1) if spare else self._executor
        self._alone = 0  # steps in which quick masks are made at once
        self._long: set[Grammar] = set()  # what they force takes too long to find
        self._slow: set[Grammar] = set()  # masks that would hold up the loop

    def begin(self, rows: list[Row]) -> list[MaskGroup]:
        """Start on the masks of the rows that have a grammar."""
        groups: list[MaskGroup] = []
        seq = -1
        for n, row in enumerate(rows):
            if row.sampling.grammar is None:
                continue
            if groups and row.seq == seq:
                groups[-1].rows.append(n)
                groups[-1].guesses.append(row.tokens[-1])
                continue
            seq = row.seq
            groups.append(MaskGroup(self._state_of(row), row, [n], []))
        fresh = [group for group in groups if self._needs_work(group)]
        self._make_apart(self._make_at_once(self._make_quick(fresh)))
        return groups

    def finish(self, groups: list[MaskGroup], patience_s: float | None) -> StepMasks:
        """Wait for the masks, or for as long as `patience_s`."""
        step, found = StepMasks(), []
        unfinished = self._unfinished(groups)
        if any(self._take_back(work) for work in unfinished):
            unfinished = self._unfinished(groups)
        if unfinished:
            wait([work.future for work in unfinished if work.future], patience_s)
        made: dict[int, bool] = {}  # by work, whose locks are not asked again for each group
        for group in groups:
            state, work = group.state, group.state.work
            assert work is not None
            if (ready := made.get(id(work))) is None:
                ready = made[id(work)] = _is_made(work)
            if not ready or state.guesses != group.guesses:
                state.slow, state.quick = True, False
                self._alone = _ALONE if work.quick else self._alone
                step.late.update(group.rows)
                if monotonic() - work.since > _HOPELESS_S:
                    step.errors[group.rows[0]] = "the grammar's next step takes too long"
                continue
            state.work, state.slow = None, False
            failure = work.future.exception() if work.future else None
            if failure is not None or state.matcher.is_error():
                lines = (str(failure or "") or state.matcher.get_error()).splitlines()
                step.errors[group.rows[0]] = f"the grammar cannot be followed: {lines[:1]}"
            step.index += group.rows
            found.append(work.masks[state.at : state.at + len(group.rows)])
        step.masks = np.concatenate(found) if found else None
        return step

    def _unfinished(self, groups: list[MaskGroup]) -> list[_Work]:
        works = {id(work): work for group in groups if (work := group.state.work)}.values()
        return [work for work in works if not _is_made(work)]

    def _take_back(self, work: _Work) -> bool:
        """Makes quick masks here whose thread, on a busy machine, has not begun."""
        if not work.quick or work.future is None or not work.future.cancel():
            return False
        self._alone = _ALONE
        self._make_apart(self._make_at_once(work.quick))
        return True

    def accept(self, row: Row, tokens: list[int]) -> int | None:
        """Consume the sampled tokens. After how many of them the grammar allows nothing more, if
        that is so."""
        state = self._states.get(row.seq)
        if state is None or state.work is not None:
            return None
        matcher = state.matcher
        count = matcher.try_consume_tokens(tokens)  # until the grammar's end
        state.taken += count
        return count if matcher.is_stopped() and not matcher.is_error() else None

    def forced(self, seq: int) -> list[int]:
        """The only tokens that may follow what the sequence's grammar has consumed, if it has one:
        names and punctuation of an object, for example. Its lexer knows in about a microsecond where
        there are none; long ones take a time that would delay the other sequences."""
        state = self._states.get(seq)
        if state is None or state.work is not None:
            return []
        if state.grammar in self._long or state.grammar in self._slow:
            return []
        tokens = state.matcher.compute_ff_tokens()
        if len(tokens) > _LONG:
            _remember(self._long, state.grammar)
        return tokens

    def forget(self, seq: int) -> None:
        self._states.pop(seq, None)

    def _state_of(self, row: Row) -> _State:
        """The sequence's state, after the output that precedes the row."""
        state = self._states.get(row.seq)
        if state is None:
            grammar = row.sampling.grammar
            assert grammar is not None
            compiled = self._compiler.find(grammar) or self._compiler.compile(grammar)
            state = self._states[row.seq] = _State(compiled.matcher(), grammar, compiled)
        outputs = row.start + len(row.tokens) - row.prompt_len
        if state.taken != outputs and (state.work is None or _is_made(state.work)):
            if state.taken > outputs:
                state.matcher.reset()
                state.taken = 0
            missing = row.history[row.prompt_len + state.taken : row.position]
            state.taken += state.matcher.try_consume_tokens(missing)
            state.work = None
        return state

    def _needs_work(self, group: MaskGroup) -> bool:
        work = group.state.work
        if work is not None and _is_made(work) and group.state.guesses != group.guesses:
            work = group.state.work = None
        return work is None

    def _make_quick(self, groups: list[MaskGroup]) -> list[MaskGroup]:
        """Has the quick masks made by the thread of their own. Returns the other groups."""
        if self._quick is None or self._alone:
            self._alone = max(0, self._alone - 1)
            return groups
        quick: list[MaskGroup] = []
        others: list[MaskGroup] = []
        for group in groups:
            slow = self._slow and group.state.grammar in self._slow
            (quick if group.state.quick and not slow else others).append(group)
        if len(quick) < _SEVERAL:
            return groups
        self._make(quick, self._quick)
        return others

    def _make_apart(self, groups: list[MaskGroup]) -> None:
        """Leaves masks to the threads, each that was late by itself."""
        self._make([group for group in groups if not group.state.slow], self._threads)
        for group in groups:
            if group.state.slow:
                self._make([group], self._threads)

    def _make_at_once(self, groups: list[MaskGroup]) -> list[MaskGroup]:
        """Makes the masks that are likely to be quick. Returns the other groups."""
        if all(group.state.rest for group in groups):
            return groups
        work, size = _Work(self._blank(groups), monotonic()), 4 * self._words
        left, at, address = [], 0, work.masks.ctypes.data
        now = began = perf_counter()
        worked = thread_time()
        for group in groups:
            state = group.state
            if state.rest or now - began > _AT_ONCE_S or state.grammar in self._slow:
                left.append(group)
                continue
            try:
                fill(state.matcher, group.guesses, address + at * size, size)
            except Exception:  # the thread that tries again keeps what it says
                left.append(group)
                continue
            before, now = now, perf_counter()
            if state.matcher.is_error():  # the thread renews it
                left.append(group)
                continue
            state.work, state.guesses, state.at = work, group.guesses, at
            at += len(group.rows)
            state.quick = now - before <= _QUICK_S * len(group.rows)
            if not state.quick:
                state.rest, state.rests = state.rests, min(2 * state.rests, _RESTS[2])
            most = _SLOW_S * len(group.rows)
            if now - before > most and thread_time() - worked > most:
                _remember(self._slow, state.grammar)
        return left

    def _blank(self, groups: list[MaskGroup]) -> Masks:
        return np.full((sum(len(group.rows) for group in groups), self._words), -1, np.int32)

    def _make(self, groups: list[MaskGroup], threads: ThreadPoolExecutor) -> None:
        if not groups:
            return
        masks, plain, guessed, at = self._blank(groups), [], [], 0
        for group in groups:
            state = group.state
            state.guesses, state.at, state.rest = group.guesses, at, max(0, state.rest - 1)
            if group.guesses:
                guessed.append((state.matcher, at, group.guesses))
            else:
                plain.append((state.matcher, at))
            at += len(group.rows)
        quick = threads is self._quick
        executor = self._quick_executor if quick else self._executor
        made = threads.submit(self._fill_and_renew, executor, groups, plain, guessed, masks)
        work = _Work(masks, monotonic(), made, groups if quick else [])
        for group in groups:
            group.state.work = work

    def _fill_and_renew(
        self,
        executor: LLExecutor,
        groups: list[MaskGroup],
        plain: list[tuple[LLMatcher, int]],
        guessed: list[tuple[LLMatcher, int, list[int]]],
        masks: Masks,
    ) -> None:
        """All sequences of a grammar share its lexer, whose states are limited in number: one that
        fails because others have filled it begins again with a new one."""
        self._fill(executor, plain, guessed, masks)
        for group in groups:
            state, row = group.state, group.row
            if not state.matcher.is_error():
                continue
            state.compiled = self._compiler.renew(state.grammar, state.compiled)
            fresh = state.matcher = state.compiled.matcher()
            state.taken = fresh.try_consume_tokens(row.history[row.prompt_len : row.position])
            size = 4 * self._words
            fill(fresh, group.guesses, masks.ctypes.data + state.at * size, size)

    def _fill(
        self,
        executor: LLExecutor,
        plain: list[tuple[LLMatcher, int]],
        guessed: list[tuple[LLMatcher, int, list[int]]],
        masks: Masks,
    ) -> None:
        where = masks.ctypes.data, 4 * self._words, len(masks)
        if plain:
            executor.unsafe_compute_mask_ptr(plain, *where)
        if guessed:
            executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)


def fill(matcher: LLMatcher, guesses: list[int], address: int, size: int) -> None:
    """Writes the mask of the matcher's next token, and those after each guess until one that it does
    not allow, one after another: `size` bytes each."""
    matcher.unsafe_compute_mask_ptr(address, size)
    taken = 0
    try:
        for guess in guesses:
            if not matcher.try_consume_tokens([guess]):
                break
            taken += 1
            matcher.unsafe_compute_mask_ptr(address + taken * size, size)
    finally:
        if taken:
            matcher.rollback(taken)


def _remember(grammars: set[Grammar], one: Grammar) -> None:
    if len(grammars) >= _REMEMBERED:
        grammars.clear()
    grammars.add(one)


def _is_made(work: _Work) -> bool:
    return work.future is None or work.future.done()
