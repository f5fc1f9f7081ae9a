"""Which sequences guess how many tokens in a step: so many that the step gives most tokens a second,
by the measured time of steps and the share of right guesses of each sequence."""

from collections.abc import Callable
from itertools import takewhile
from math import floor

from engine.batch import Drafter, Row
from engine.config import EngineConfig
from engine.decoding.edits import penalised
from engine.scheduling.sequence import Sequence
from engine.speculation.costs import StepCosts, bends_of, seconds_of
from engine.speculation.drafting import Acceptance, best_drafts
from engine.speculation.lookup import PromptLookup
from engine.speculation.prediction import PredictedText
from engine.speculation.turns import Turns

_MOST = 16  # guesses of a sequence in a step
_READ = 1024  # ids that a step reads to find repeats, of all sequences: about 0.5 ms
_WINDOW = 16 * 1024  # ids of a prompt that are read: its last ones
_UNLIKELY = 0.1  # no guess of a smaller chance is considered
_FORGOTTEN = 0.995  # of a draft's measured time at each step without: it is tried again some time
_GAIN = 1.05  # by which a step with guesses must be better
_CROWD = 4  # a sequence without a repeat is left alone for a step for each so many that decode
_FRESH = 16  # steps with guesses, of a crowd, until one without shows again what that takes

Guesses = dict[int, list[int]]  # by the sequence's number
Forced = Callable[[int], list[int]]  # `Runner.forced`


class Speculation:
    """Guesses for the running sequences of one engine."""

    def __init__(
        self, config: EngineConfig, drafter: Drafter | None = None, forced: Forced | None = None
    ) -> None:
        self._on = config.speculation == "auto"
        self._drafter = drafter
        self.forced = forced  # None: nothing that a grammar forces is guessed
        self._step = 0
        self._resting: dict[int, int] = {}  # by sequence: the step before which it is not looked up
        self._drafting, self._forcing = Turns(), Turns()
        self._accepted: dict[int, Acceptance] = {}  # of the draft model, by the sequence's number
        self._drafted: Guesses = {}  # of the last step, by the draft model
        self._costs = StepCosts()
        self._lookups: dict[int, PromptLookup | PredictedText] = {}  # by the sequence's number
        self._left = 0  # ids that this step may still read

    def record(self, rows: list[tuple[Sequence, Row]], seconds: float) -> None:
        """A step of these rows took so long."""
        if self._on and rows and all(row.start >= row.prompt_len for _, row in rows):
            self._costs.record(sum(len(row.tokens) for _, row in rows), seconds)
        for seq, row in rows if self._drafted else ():
            if row.drafts and seq.number in self._drafted:
                said = seq.history[row.position - row.drafts : row.position]
                guesses = row.tokens[len(row.tokens) - row.drafts :]
                pairs = zip(guesses, said, strict=False)
                right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._accepted[seq.number].record(right, row.drafts)

    def forget(self, seq: Sequence) -> None:
        self._lookups.pop(seq.number, None)
        self._resting.pop(seq.number, None)
        self._accepted.pop(seq.number, None)
        if self._drafter is not None:
            self._drafter.forget(seq.number)

    def guesses(self, decoding: list[Sequence], room: int, token_s: float | None) -> Guesses:
        """For sequences that decode in a step that has nothing else to do.

        room: how many guesses the step can take. token_s: what a token of a prompt takes, if known.
        """
        if not self._on:
            return {}
        self._step += 1
        if len(decoding) > _CROWD and self._costs.age(len(decoding)) > _FRESH:
            return {}
        taken = self._follow(decoding, room, token_s)
        rows = len(decoding) + sum(map(len, taken.values()))
        room -= rows - len(decoding)
        free = [seq for seq in decoding if seq.number not in taken] if taken else decoding
        found = self._looked_up(free, rows, room, token_s)
        self._drafted = {}
        if self._drafter is not None and self._drafting.is_due(rows) and self._costs.measured(rows):
            looked_up = sum(map(len, found.values()))
            free = [seq for seq in free if seq.number not in found]
            self._drafted = self._draft(
                self._drafter, free, rows + looked_up, room - looked_up, token_s
            )
        return taken | found | self._drafted

    def _follow(self, decoding: list[Sequence], room: int, token_s: float | None) -> Guesses:
        """What grammars force: certain guesses, if those are worth it in a step of this size."""
        ruled = [s for s in decoding if s.request.inputs.sampling.grammar and not s.pending]
        rows = len(decoding)
        if self.forced is None or not ruled or not self._costs.measured(rows):
            return {}
        if not self._forcing.is_due(rows):
            return {}
        if not self._best_certain(min(room, _MOST * len(ruled)), rows, token_s):
            self._forcing.was_worth(False)
            return {}
        found: Guesses = {}
        count = 0
        for seq in ruled:
            most = min(_most(seq), room - count)
            ids = self.forced(seq.number)[:most] if most > 0 else []
            if ids:
                found[seq.number] = ids
                count += len(ids)
        # What is forced now may be far less than a token of each.
        worth = self._best_certain(count, rows, token_s)
        self._forcing.was_worth(bool(worth))
        return _first_of(found, worth)

    def _looked_up(
        self, decoding: list[Sequence], rows: int, room: int, token_s: float | None
    ) -> Guesses:
        """rows: tokens of the step so far."""
        self._left = _READ
        offers: list[tuple[float, int, int]] = []  # worth, sequence, number of the guess
        found: Guesses = {}
        later = self._step + 1 + len(decoding) // _CROWD
        for seq in decoding:
            if self._resting.get(seq.number, 0) > self._step:
                continue
            ids, worths = self._offer(seq)
            if ids:
                found[seq.number] = ids
                offers += [(worth, -n, seq.number) for n, worth in enumerate(worths)]
            else:
                self._resting[seq.number] = later
        if not offers or not self._costs.measured(rows):
            return {}
        offers.sort(reverse=True)
        taken: Guesses = {}
        for _, n, number in offers[: self._best(offers[:room], rows, token_s)]:
            taken[number] = found[number][: 1 - n]
        return taken

    def _draft(
        self,
        drafter: Drafter,
        decoding: list[Sequence],
        rows: int,
        room: int,
        token_s: float | None,
    ) -> Guesses:
        """For sequences without other guesses, as far as the draft model is worth its time."""
        able = {seq.number: seq for seq in decoding if not seq.pending and _most(seq) > 0}
        if not able:
            return {}
        share = {n: self._accepted.setdefault(n, Acceptance()).share for n in able}
        ranked = sorted(able, key=lambda number: -share[number])
        curve = self._costs.curve(token_s)
        shares = [share[number] for number in ranked]
        size, count = best_drafts(shares, rows, room, curve, drafter.step_s)
        steps = self._drafting.was_worth(bool(size))
        for number in ranked[size:]:
            self._accepted[number].rest(steps)
        if not size:
            drafter.step_s *= _FORGOTTEN**steps
            return {}
        found = drafter.guesses({n: able[n].history for n in ranked[:size]}, count)
        return {number: ids[: _most(able[number])] for number, ids in found.items()}

    def _offer(self, seq: Sequence) -> tuple[list[int], list[float]]:
        """Possible guesses, and how many tokens each is expected to add."""
        most = _most(seq)
        if most <= 0:
            return [], []
        lookup = self._lookups.get(seq.number)
        if lookup is None:
            lookup = self._lookups[seq.number] = _lookup_of(seq)
        self._left -= lookup.read(seq.history, self._left)
        ids, chances = lookup.guesses(seq.history, seq.pending, most, _UNLIKELY)
        if not seq.pending or not ids:
            return ids, chances
        # An overlapped sequence has no row in the next step: where its tokens will be is not known
        # before this one is read.
        count, worth = len(ids), sum(chances) - 1
        return (ids, [worth / count] * count) if worth > 0 else ([], [])

    def _best(self, offers: list[tuple[float, int, int]], rows: int, token_s: float | None) -> int:
        """How many of the offers, the best first, give most tokens a second."""
        curve = self._costs.curve(token_s)
        plain = rows / max(seconds_of(curve, rows), 1e-9)
        best, best_rate, expected = 0, _GAIN * plain, float(rows)
        for count, (worth, _, _) in enumerate(offers, 1):
            expected += worth
            rate = expected / max(seconds_of(curve, rows + count), 1e-9)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _best_certain(self, most: int, rows: int, token_s: float | None) -> int:
        """The same of guesses that are certain, up to `most`. Between two bends, the rate only rises
        or only falls."""
        curve = self._costs.curve(token_s)
        points = [floor(tokens) - rows for tokens in bends_of(curve)]
        best, best_rate = 0, _GAIN * rows / max(seconds_of(curve, rows), 1e-9)
        for count in sorted({1, most, *points, *(count + 1 for count in points)}):
            if 0 < count <= most:
                rate = (rows + count) / max(seconds_of(curve, rows + count), 1e-9)
                if rate > best_rate:
                    best, best_rate = count, rate
        return best


def _lookup_of(seq: Sequence) -> PromptLookup | PredictedText:
    prediction = seq.request.inputs.prediction
    if prediction:
        return PredictedText(seq.history, seq.prompt_len, prediction, _WINDOW)
    return PromptLookup(max(0, seq.prompt_len - _WINDOW), seq.prompt_len)


def _first_of(found: Guesses, count: int) -> Guesses:
    """So many of the guesses."""
    kept: Guesses = {}
    for number, ids in found.items():
        if count <= 0:
            break
        kept[number] = ids[:count]
        count -= len(ids)
    return kept


def _most(seq: Sequence) -> int:
    """How many guesses the sequence may verify."""
    params = seq.request.inputs.sampling
    if penalised(params):
        return 0
    left = min(params.max_tokens - seq.output_len, seq.request.limit - len(seq.history))
    return min(_MOST, left - seq.pending - 1)
