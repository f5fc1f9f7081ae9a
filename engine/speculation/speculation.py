"""Which sequences guess how many tokens in a step: so many that the step gives most tokens a second,
by the measured time of steps and the share of right guesses of each sequence."""

from engine.batch import Row
from engine.config import EngineConfig
from engine.decoding.edits import penalised
from engine.scheduling.sequence import Sequence
from engine.speculation.costs import StepCosts, seconds_of
from engine.speculation.lookup import PromptLookup

_MOST = 16  # guesses of a sequence in a step
_READ = 1024  # ids that a step reads to find repeats, of all sequences: about 0.5 ms
_WINDOW = 16 * 1024  # ids of a prompt that are read: its last ones
_UNLIKELY = 0.1  # no guess of a smaller chance is considered
_GAIN = 1.05  # by which a step with guesses must be better

Guesses = dict[int, list[int]]  # by the sequence's number


class Speculation:
    """Guesses for the running sequences of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._on = config.speculation == "auto"
        self._costs = StepCosts()
        self._lookups: dict[int, PromptLookup] = {}  # by the sequence's number
        self._left = 0  # ids that this step may still read

    def record(self, rows: list[tuple[Sequence, Row]], seconds: float) -> None:
        """A step of these rows took so long."""
        if self._on and rows and all(row.start >= row.prompt_len for _, row in rows):
            self._costs.record(sum(len(row.tokens) for _, row in rows), seconds)

    def forget(self, seq: Sequence) -> None:
        self._lookups.pop(seq.number, None)

    def guesses(self, decoding: list[Sequence], room: int, token_s: float | None) -> Guesses:
        """For sequences that decode in a step that has nothing else to do.

        room: how many guesses the step can take. token_s: what a token of a prompt takes, if known.
        """
        if not self._on:
            return {}
        self._left = _READ
        offers: list[tuple[float, int, int]] = []  # worth, sequence, number of the guess
        found: Guesses = {}
        for seq in decoding:
            ids, worths = self._offer(seq)
            if ids:
                found[seq.number] = ids
                offers += [(worth, -n, seq.number) for n, worth in enumerate(worths)]
        if not offers or not self._costs.measured(len(decoding)):
            return {}
        offers.sort(reverse=True)
        taken: Guesses = {}
        for _, n, number in offers[: self._best(offers[:room], len(decoding), token_s)]:
            taken[number] = found[number][: 1 - n]
        return taken

    def _offer(self, seq: Sequence) -> tuple[list[int], list[float]]:
        """Possible guesses, and how many tokens each is expected to add."""
        params = seq.request.inputs.sampling
        most = min(
            params.max_tokens - seq.output_len,
            seq.request.limit - len(seq.history),
        )
        most = min(_MOST, most - seq.pending - 1)
        if most <= 0 or penalised(params):
            return [], []
        lookup = self._lookups.get(seq.number)
        if lookup is None:
            first = max(0, seq.prompt_len - _WINDOW)
            lookup = self._lookups[seq.number] = PromptLookup(first, seq.prompt_len)
        self._left -= lookup.read(seq.history, self._left)
        ids, chances = lookup.guesses(seq.history, seq.pending, most)
        count = sum(chance >= _UNLIKELY for chance in chances)
        ids, chances = ids[:count], chances[:count]
        if not seq.pending:
            return ids, chances
        # An overlapped sequence has no row in the next step: where its tokens will be is not known
        # before this one is read.
        worth = sum(chances) - 1
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
