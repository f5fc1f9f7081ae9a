"""The grammar state of every constrained sequence, and the masks of a step.

Where the model leaves a core free, a thread of its own follows the grammars and makes the masks while the
model computes its logits; otherwise the loop's thread does so before, because threads take longer to wake
up. Masks that take long are left to further threads; llguidance releases the interpreter's lock. A
sequence whose mask is not ready in time has no token in that step and is sampled by a later one, so that
it does not delay the others.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from time import monotonic, perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np

from engine.batch import Row
from engine.decoding.few import FewIds, few_ids
from engine.decoding.grammar.beside import Beside, Job
from engine.decoding.grammar.compiler import GrammarCompiler
from engine.decoding.grammar.digit_runs import DigitRuns
from engine.decoding.grammar.step_masks import (
    RESTS,
    Begun,
    MaskGroup,
    MatcherState,
    StepMasks,
    Work,
)
from engine.decoding.masks import Masks
from engine.protocol import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_THREADS = 2
PATIENCE_S = 0.005  # how long a step waits for masks after its logits
_HOPELESS_S = 10.0  # after which a sequence without its mask ends
_QUICK_S = 0.0001  # longer than this: a sequence's next masks are left to the threads
_SLOW_S = 0.002  # more processor time than this: all masks of the grammar are left to the threads
_AT_ONCE_S = 0.0005  # after which a step leaves all others to the threads
_BESIDE_S = 0.004  # the same for the helper thread
_SEVERAL = 4  # masks that are worth waking a thread for
_ALONE = 64  # steps without that thread, after one in which it was late
_LONG = (
    512  # a grammar that forces more tokens, which takes a millisecond to find, is not asked again
)
_REMEMBERED = 128  # such grammars, and slow ones


class Matchers:
    def __init__(
        self,
        compiler: GrammarCompiler,
        vocab: int,
        *,
        runs: DigitRuns | None = None,
        spare: bool = False,
        lists: bool = False,
    ) -> None:
        """runs: what ends long numbers. spare: whether the model leaves a core free. lists: whether few
        ids are listed."""
        self._compiler = compiler
        self._vocab = vocab
        self._lists = lists
        self._runs = runs
        self._words = -(-vocab // 32)
        self._states: dict[int, MatcherState] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="masks")
        self._beside = Beside("quick-masks") if spare else None
        self._alone = 0  # steps in which masks are made before the model's work
        self._long: set[Grammar] = set()  # what they force takes too long to find
        self._slow: set[Grammar] = set()  # masks that would hold up the loop

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(num_threads=_THREADS)

    def begin(self, rows: list[Row]) -> Begun | None:
        """Start on the masks of the rows that have a grammar."""
        index = [n for n, row in enumerate(rows) if row.sampling.grammar is not None]
        if not index:
            return None
        begun = Begun(rows, index, Work(self._blank(len(index)), monotonic()))
        begun.grouped.acquire()
        if self._beside is None or self._alone or len(index) < _SEVERAL:
            self._alone = max(0, self._alone - 1)
            self._make_all(begun, _AT_ONCE_S, perf_counter)
        else:
            # Its clock leaves out how long it waits for the interpreter's lock.
            work = partial(self._make_all, begun, _BESIDE_S, thread_time)
            begun.work.future = self._beside.submit(work)
        return begun

    def finish(self, begun: Begun, patience_s: float | None) -> StepMasks:
        """Wait for the masks, or for as long as `patience_s`."""
        if isinstance(begun.work.future, Job):
            self._await(begun, begun.work.future, patience_s)
        if not begun.whole:
            self._await_others(begun, patience_s)
        if begun.whole:
            for group in begun.groups:
                group.state.work, group.state.slow = None, False
            if self._end_numbers(begun.groups, begun.work.masks):
                begun.few = self._few(begun.work.masks, begun.index)
            return StepMasks(begun.index, begun.work.masks, begun.few)
        step, masks = StepMasks(), begun.work.masks
        kept: list[int] = []
        made: dict[int, bool] = {}  # by work, whose locks are not asked again for each group
        for group in begun.groups:
            state, work, at = group.state, group.state.work, group.at
            places = range(at, at + 1 + len(group.guesses))
            assert work is not None
            if (ready := made.get(id(work))) is None:
                ready = made[id(work)] = work.made
            if not ready or state.guesses != group.guesses:
                state.slow = True
                self._alone = _ALONE if work is begun.work else self._alone
                step.late.update(begun.index[n] for n in places)
                if monotonic() - work.since > _HOPELESS_S:
                    step.errors[begun.index[at]] = "the grammar's next step takes too long"
                continue
            state.work, state.slow = None, False
            failure = work.future.exception() if work.future else None
            if failure is not None or state.matcher.is_error():
                lines = (str(failure or "") or state.matcher.get_error()).splitlines()
                step.errors[begun.index[at]] = f"the grammar cannot be followed: {lines[:1]}"
            if work.masks is not masks:  # it was begun for an earlier step
                masks[at : places.stop] = work.masks[state.at : state.at + len(places)]
            kept += places
        if kept:
            made_now = [group for group in begun.groups if begun.index[group.at] not in step.late]
            self._end_numbers(made_now, masks)
            step.index = [begun.index[n] for n in kept]
            step.masks = masks if len(kept) == len(masks) else masks[kept]
            step.few = self._few(step.masks, step.index)
        return step

    def _end_numbers(self, groups: list[MaskGroup], masks: Masks) -> bool:
        """Whether a mask has changed."""
        if self._runs is None:
            return False
        ended = False
        for group in groups:
            row = group.row
            if group.state.grammar.kind != "json_schema":
                continue
            if self._runs.is_long(row.history[row.prompt_len : row.position]):
                self._runs.end(masks[group.at])
                ended = True
        return ended

    def _few(self, masks: Masks, index: list[int]) -> FewIds | None:
        return few_ids(masks, index, self._vocab) if self._lists else None

    def _await(self, begun: Begun, job: Job, patience_s: float | None) -> None:
        """Wait for the helper thread."""
        if not job.done() and job.cancel():  # on a busy machine, it has not begun
            self._alone = _ALONE
            begun.work.future = None
            self._make_all(begun, _AT_ONCE_S, perf_counter)
            return
        job.wait(patience_s)
        begun.grouped.acquire()
        if not begun.groups:
            job.wait(None)
            failure = job.exception()
            assert failure is not None
            raise failure

    def _await_others(self, begun: Begun, patience_s: float | None) -> None:
        """Wait for what is left to the threads, or was begun for an earlier step."""
        works = {id(work): work for group in begun.groups if (work := group.state.work)}
        works.pop(id(begun.work), None)
        futures = [work.future for work in works.values() if not work.made]
        for each in futures:
            if isinstance(each, Job):
                each.wait(patience_s)
        if left := [each for each in futures if isinstance(each, Future)]:
            wait(left, patience_s)

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

    def _state_of(self, row: Row) -> MatcherState:
        """The sequence's state, after the output that precedes the row."""
        state = self._states.get(row.seq)
        if state is None:
            grammar = row.sampling.grammar
            assert grammar is not None
            compiled = self._compiler.find(grammar) or self._compiler.compile(grammar)
            state = self._states[row.seq] = MatcherState(compiled.matcher(), grammar, compiled)
        outputs = row.start + len(row.tokens) - row.prompt_len
        if state.taken != outputs and (state.work is None or state.work.made):
            if state.taken > outputs:
                state.matcher.reset()
                state.taken = 0
            missing = row.history[row.prompt_len + state.taken : row.position]
            state.taken += state.matcher.try_consume_tokens(missing)
            state.work = None
        return state

    def _needs_work(self, group: MaskGroup) -> bool:
        work = group.state.work
        if work is not None and work.made and group.state.guesses != group.guesses:
            work = group.state.work = None
        return work is None

    def _make_all(self, begun: Begun, most_s: float, clock: Callable[[], float]) -> None:
        """Follows the grammars up to the rows, makes quick masks and leaves others to the threads."""
        quick: list[MaskGroup] = []
        others: list[MaskGroup] = []
        try:
            groups = self._grouped(begun)
            for group in groups:
                state = group.state
                if not self._needs_work(group):
                    continue
                if state.rest or state.grammar in self._slow:
                    others.append(group)
                    continue
                quick.append(group)
                state.work, state.guesses, state.at = begun.work, group.guesses, group.at
            self._make_apart(others, begun.work.masks)
            begun.groups = groups
        finally:
            begun.grouped.release()
        left = self._make_at_once(quick, begun, most_s, clock)
        self._make_apart(left, begun.work.masks)
        if not left and len(quick) == len(groups):
            begun.few = self._few(begun.work.masks, begun.index)
            begun.whole = True

    def _grouped(self, begun: Begun) -> list[MaskGroup]:
        groups: list[MaskGroup] = []
        seq = -1
        for at, n in enumerate(begun.index):
            row = begun.rows[n]
            if groups and row.seq == seq:
                groups[-1].guesses.append(row.tokens[-1])
                continue
            seq = row.seq
            groups.append(MaskGroup(self._state_of(row), row, at, []))
        return groups

    def _make_apart(self, groups: list[MaskGroup], masks: Masks) -> None:
        """Leaves masks to the threads, each that was late by itself."""
        self._make([group for group in groups if not group.state.slow], masks)
        for group in groups:
            if group.state.slow:
                self._make([group], masks)

    def _make_at_once(
        self, groups: list[MaskGroup], begun: Begun, most_s: float, clock: Callable[[], float]
    ) -> list[MaskGroup]:
        """Makes the masks that are likely to be quick. Returns the groups that were not."""
        size, address = 4 * self._words, begun.work.masks.ctypes.data
        left: list[MaskGroup] = []
        now = began = clock()
        worked = thread_time()
        for group in groups:
            state = group.state
            if now - began > most_s or state.grammar in self._slow:
                left.append(group)
                continue
            try:
                fill(state.matcher, group.guesses, address + state.at * size, size)
            except Exception:  # the thread that tries again keeps what it says
                left.append(group)
                continue
            before, now = now, clock()
            if state.matcher.is_error():  # the thread renews it
                left.append(group)
                continue
            if now - before > _QUICK_S * (1 + len(group.guesses)):
                state.rest, state.rests = state.rests, min(2 * state.rests, RESTS[2])
            most = _SLOW_S * (1 + len(group.guesses))
            if now - before > most and thread_time() - worked > most:
                _remember(self._slow, state.grammar)
        return left

    def _blank(self, rows: int) -> Masks:
        return np.full((rows, self._words), -1, np.int32)

    def _make(self, groups: list[MaskGroup], masks: Masks) -> None:
        if not groups:
            return
        plain, guessed = [], []
        for group in groups:
            state = group.state
            state.guesses, state.at, state.rest = group.guesses, group.at, max(0, state.rest - 1)
            if group.guesses:
                guessed.append((state.matcher, group.at, group.guesses))
            else:
                plain.append((state.matcher, group.at))
        made = self._threads.submit(self._fill_and_renew, groups, plain, guessed, masks)
        work = Work(masks, monotonic(), made)
        for group in groups:
            group.state.work = work

    def _fill_and_renew(
        self,
        groups: list[MaskGroup],
        plain: list[tuple["LLMatcher", int]],
        guessed: list[tuple["LLMatcher", int, list[int]]],
        masks: Masks,
    ) -> None:
        """All sequences of a grammar share its lexer, whose states are limited in number: one that
        fails because others have filled it begins again with a new one."""
        self._fill(plain, guessed, masks)
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
        plain: list[tuple["LLMatcher", int]],
        guessed: list[tuple["LLMatcher", int, list[int]]],
        masks: Masks,
    ) -> None:
        where = masks.ctypes.data, 4 * self._words, len(masks)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if guessed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)


def fill(matcher: "LLMatcher", guesses: list[int], address: int, size: int) -> None:
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
