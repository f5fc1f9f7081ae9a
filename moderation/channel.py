"""One channel of one choice of a stream: its received, judged and released text.

All offsets are into the channel's text as the engine produced it.
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from moderation.looks import Looks
from moderation.loose import LooseStream
from moderation.normalise import FoldStream, View, fold, folded_text, lower, spaced
from moderation.policy import ASYNC, FULL, LONGEST_HOLD, WINDOW, Policy, Stage
from moderation.rules import loose_spans, merged, spans_of, without_allowed
from moderation.scoring import Scored, Successive, score_one
from moderation.screener import Findings, Screener
from moderation.verdict import ANNOTATE, BLOCK, REDACT, Action, Span

_log = logging.getLogger(__name__)

# Characters in the classifier's window, as for prompts; only the last stride is new.
OUTPUT_WINDOW = 400
_LOOKS = 3  # that are slow, at the text in a stride, with its checkpoint
# View characters kept before the last final offset, for word boundaries.
_CONTEXT = 64
_MAX_KEPT = 2_048
# Where the whole answer is held: characters that are judged together.
_NEEDED_WHEN_FULL = 128
# Most checkpoints of one chunk that are scored together; bounds the scores that a block discards.
_MAX_BATCH = 16
_SPACE = re.compile(r"\s")


def stride_at(offset: int, longest: int) -> int:
    """Return the least distance to the next checkpoint, which is at most twice as far: short at first,
    longer in long answers."""
    stride = 32 if offset < 256 else 64 if offset < 2_048 else 128
    return min(stride, longest // 2)


def checkpoints(text: str, checked: int, length: int, longest: int = LONGEST_HOLD) -> list[int]:
    """Return the offsets in `text` of its checkpoints. `checked` is the offset of the last
    checkpoint before it, `length` that of its first character; they are at most `longest` apart."""
    found: list[int] = []
    begin = 0
    while True:
        stride = stride_at(checked, longest)
        soonest = checked + stride - length
        if soonest > len(text):
            return found
        space = _SPACE.search(text, max(begin, soonest - 1))
        at = soonest + stride if space is None else min(space.end(), soonest + stride)
        if at > len(text):
            return found
        found.append(at)
        checked, begin = length + at, at


class Release(Struct, frozen=True):
    """Text that may be sent now. After `blocked`, no more text of this choice is released."""

    text: str
    blocked: bool = False


_NOTHING = Release("")


class _Scan(Struct, frozen=True):
    """Spans found after the last final offset, and the first offsets that are held: by any rule,
    and by a rule that redacts or blocks."""

    spans: Sequence[Span]
    hold: int
    strict_hold: int


class Channel:
    _raw = ""  # from `_released` on
    _unread = ""  # what was received and is not folded yet
    _released = 0
    _length = 0
    _checked = 0
    _cleared = 0  # up to where it was clearly harmless at a look
    _settled = 0
    _coming: Successive | None = None
    _waits = False  # whether text waited after the last piece
    # How often text began to wait for a verdict of the classifier, and for the end of what a rule may
    # match; and the most characters that waited.
    holds_by_score = holds_by_rule = longest_held = 0

    def __init__(
        self,
        policy: Policy,
        screener: Screener,
        findings: Findings,
        index: int = 0,
        before: str = "",
    ) -> None:
        """`before` is text that the channel's continues, and that was released: rules read over the
        border, at negative offsets, and act on what is new."""
        self._policy = policy
        self._screen = policy.output
        self._screener = screener
        self._findings = findings
        self._index = index
        self._folded = FoldStream.after(len(before)) if before else FoldStream()
        self._loose = LooseStream()
        self._foreign = 0  # view characters of `before` that are kept
        self._schedule(0)
        self._waiting: list[Span] = []
        self.cuts: list[tuple[int, int]] = []  # removed text, of what was released so far
        self._toothless = policy.shadow or policy.mode is ASYNC
        # Whether a rule can hold or cut out text; if none can, they are asked at checkpoints alone.
        self._rules_cut = self._screen.has_terms or (
            not self._toothless and self._screen.holds_acting
        )
        if before:
            self._begin_after(before)
        strictest = self._effective_action(self._screen.strictest)
        self._is_looked_at = strictest >= REDACT and screener.classifier is not None
        self._begun_looks: Looks | None = None

    def _begin_after(self, before: str) -> None:
        self._settled = -len(before)
        self._unread = before
        self._foreign = len(self._fold.view().text)
        try:
            self._settled = self._scan(final=False).hold
        except Exception as error:  # the first verdict meets it again, and decides what follows
            _log.error("the output rules failed: %s", type(error).__name__)

    @property
    def _looks(self) -> Looks:
        """At the channel's own text, from the first look on: an answer that comes whole needs none."""
        if self._begun_looks is None:
            assert self._screener.classifier is not None
            limits = self._screen.clearly_harmless, self._screen.harmless_heads
            self._begun_looks = Looks(self._screener.classifier, *limits, OUTPUT_WINDOW)
        return self._begun_looks

    @property
    def held(self) -> int:
        """How many received characters are not judged yet."""
        return self._length - self._released

    @property
    def needed(self) -> int:
        """How many characters must follow before any more can be released or blocked, at least 1."""
        if self._policy.mode is FULL:
            return _NEEDED_WHEN_FULL
        if not self._is_looked_at or self._looks.quick:
            return 1  # the next character may decide what is held
        left = min(self._next_look, self._soonest) - self._length
        return left if left > 1 else 1

    @property
    def spare(self) -> int:
        """How many characters can follow before the next verdict: they cannot be blocked."""
        return max(0, self._soonest - 1 - self._length)

    @property
    def _next_look(self) -> int:
        """The length at which a slow look is made, unless a checkpoint comes before."""
        if not self._released and self._length <= stride_at(0, self._policy.longest_hold):
            return self._length  # the first text is released as soon as it is clearly harmless
        return self._look_at

    def _schedule(self, length: int) -> None:
        """After a slow look or a checkpoint at `length`: where the next ones are."""
        stride = stride_at(self._checked, self._policy.longest_hold)
        step = stride // _LOOKS
        self._soonest = self._checked + stride  # its checkpoint is at the next space
        # One shortly before would release little.
        late = length + 2 * step > self._soonest
        self._look_at = length + 2 * step if late else length + step

    def feed(self, text: str, *, last: bool = False) -> Release:
        """`last`: `end` follows at once, and makes the verdict on what a look would be at."""
        self._raw += text
        size = len(text)
        if self._soonest - self._length > size:  # no checkpoint yet
            self._unread += text
            self._length += size
            released = self._release_early(text, looks=not last)
            if self._released < self._length and not last:
                self._note_hold()
            elif self._waits:
                self._waits = False
            return Release(released) if released else _NOTHING
        longest = self._policy.longest_hold
        begin, places = 0, checkpoints(text, self._checked, self._length, longest)
        for first in range(0, len(places), _MAX_BATCH):
            group = places[first : first + _MAX_BATCH]
            pieces = [text[start:end] for start, end in pairwise((begin, *group))]
            begin = group[-1]
            self._coming = self._windows(pieces)
            for piece in pieces:
                self._unread += piece
                self._length += len(piece)
                if self._is_looked_at and not last:
                    self._looks.push(piece)
                if (stopped := self._check(final=False)) is not None:
                    return stopped
        if begin < len(text):
            self._unread += text[begin:]
            self._length += len(text) - begin
        released = self._release_early(text[begin:], looks=not last)
        self._waits = self._waits and self._released < self._length
        if self._released < self._length and not last:
            self._note_hold()
        return Release(released)

    def _note_hold(self) -> None:
        """Some text waits after what was received last."""
        if self._policy.mode is not WINDOW:
            return
        if not self._waits:
            self._waits = True
            scored = max(self._cleared, self._checked) if self._is_looked_at else self._length
            by_score = scored < self._length
            self.holds_by_score += by_score
            self.holds_by_rule += not by_score
        if self.held > self.longest_held:
            self.longest_held = self.held

    def _windows(self, pieces: Sequence[str]) -> Successive | None:
        """The windows that end at the checkpoints that the `pieces` end at."""
        if self._screener.classifier is None:
            return None
        text = self._window()
        end, cuts = len(text), []
        pieces = list(map(folded_text, pieces))
        for piece in pieces:
            end += len(piece)
            cuts.append((max(0, end - OUTPUT_WINDOW), end))
        return Successive(self._screener.classifier, text + "".join(pieces), cuts)

    def end(self) -> Release:
        stopped = self._check(final=True)
        if stopped is not None:
            return stopped
        return Release(self._emit(self._scan(final=True), self._length))

    @property
    def _fold(self) -> FoldStream:
        """The folded text, which is made when it is asked for."""
        text = self._unread
        if text:
            self._unread = ""
            known = len(self._folded.view().text) if self._screen.deny else 0
            self._folded.push(fold(text), len(text))
            if self._screen.deny:
                view = self._folded.view()
                self._loose.push(view.text[known:], view.starts[known:], view.ends[known:])
        return self._folded

    def _effective_action(self, action: Action) -> Action:
        return min(action, ANNOTATE) if self._toothless else action

    def _check(self, final: bool) -> Release | None:
        """Judge all text so far; return the last release if the choice must stop."""
        try:
            scan = self._scan(final)
            self._record(scan, final)
        except Exception as error:
            # Only the type: the message of an error may quote the text.
            _log.error("the output rules failed: %s", type(error).__name__)
            self._findings.fail(self._policy, Stage.RULES)
            scan = _Scan((), self._length, self._length)
            if not self._policy.fails_open(Stage.RULES) and not self._toothless:
                return Release("", blocked=True)
        passed = self._judge(final)
        stops = [s.start for s in scan.spans if self._blocks(s) and s.start < self._settled]
        if not passed:
            return Release("", blocked=True)
        if stops:
            text = self._emit(scan, min(stops)) if self._policy.mode is WINDOW else ""
            return Release(text, blocked=True)
        self._forget()
        return None

    def _forget(self) -> None:
        """Drop text that no rule and no window will read again, so that memory stays bounded."""
        plain = self._fold.view()
        if len(plain.text) <= OUTPUT_WINDOW + _MAX_KEPT:
            return
        settled = bisect_left(plain.starts, self._settled) - _CONTEXT
        surplus = min(settled, len(plain.text) - OUTPUT_WINDOW)
        if surplus > _MAX_KEPT:
            self._fold.drop(surplus)
            self._foreign = max(0, self._foreign - surplus)
            self._loose.drop(bisect_left(self._loose.view().starts, self._settled) - _CONTEXT)

    def _blocks(self, span: Span) -> bool:
        return self._effective_action(span.action) is BLOCK

    def _record(self, scan: _Scan, final: bool) -> None:
        if not scan.spans:
            if (settled := self._length if final else scan.hold) > self._settled:
                self._settled = settled
            return
        settled = self._length if final else _before_cut_spans(scan.spans, scan.hold)
        fresh = [span for span in scan.spans if self._settled <= span.start < settled]
        own = [s if s.start >= 0 else replace(s, start=0) for s in fresh]
        self._findings.add_spans(own, "plain")
        self._waiting += [s for s in fresh if self._effective_action(s.action) >= REDACT]
        self._settled = max(settled, self._settled)

    def _judge(self, final: bool) -> bool:
        """Run the classifier over the window that ends here. Whether the answer may continue."""
        fresh = self._length - self._checked
        start, self._checked = self._checked, self._length
        self._schedule(self._length)
        if self._screener.classifier is None or not self._screen.categories or not fresh:
            return True
        try:
            scored = self._score() if self._coming is None or final else self._coming.next()
            action = self._findings.add_scores(scored, self._screen)
        except Exception as error:
            _log.error("the classifier failed: %s", type(error).__name__)
            self._findings.fail(self._policy, Stage.CLASSIFIER)
            return self._policy.fails_open(Stage.CLASSIFIER) or self._toothless
        action = self._effective_action(action)
        if action is REDACT:
            cut = Span(self._index, start, self._length, "redacted", "classifier", action)
            self._waiting.append(replace(cut, start=max(start, self._released)))
            self._findings.spans.append(cut)
        return action is not BLOCK

    def _score(self) -> Scored:
        """The scores of the window at the present end of the text."""
        assert self._screener.classifier is not None
        return score_one(self._screener.classifier, self._window())

    def _window(self) -> str:
        """What the classifier reads: the last of the channel's own text."""
        text = self._fold.view().text
        return text[max(self._foreign, len(text) - OUTPUT_WINDOW) :]

    def _scan(self, final: bool) -> _Scan:
        if final and self._settled >= self._length:
            return _Scan((), self._length, self._length)
        plain = self._fold.view()
        lowered = lower(plain.text) if self._screen.has_terms else ""
        start = bisect_left(plain.starts, self._settled)
        spans = spans_of(self._screen, plain, lowered, start, self._index)
        hold = strict = self._length
        if not final:
            hold, strict = self._holds(plain, lowered, start)
        if self._screen.deny:
            if final:
                self._loose.finish()
            loose = self._loose.view()
            begin = bisect_left(loose.starts, self._settled)
            spans += loose_spans(self._screen, loose, self._index, begin)
            if not final:
                known = self._length if self._loose.open_from is None else self._loose.open_from
                at = _original(loose, self._screen.loose_terms.hold(loose.text, begin), known)
                hold = min(hold, at)
                strict = (
                    min(strict, at)
                    if self._effective_action(self._screen.terms.strictest_action) > 1
                    else strict
                )
        if spans:
            spans = without_allowed(self._screen, plain, lowered, _distinct(spans))
            if self._foreign:
                spans = [span for span in spans if span.end > 0]
        return _Scan(spans, hold, strict)

    def _holds(self, plain: View, lowered: str, start: int) -> tuple[int, int]:
        """The first index at which a rule of the plain view may still match, and the first for a
        rule that redacts or blocks."""
        text = spaced(plain.text)
        acts = not self._toothless
        hold = strict = len(text)
        for each, on in self._screen.hold_matchers:
            at = each.hold(text, start)
            if at < hold:
                hold = at
            if on and acts and at < strict:
                strict = at
        if self._screen.has_terms:
            terms = self._screen.terms
            at = terms.hold(lowered, start)
            # A hit that may still be part of an allowed phrase is not cut out yet.
            allowed = self._screen.allowed.hold(lowered, start)
            acting = self._effective_action(terms.strictest_action) > ANNOTATE
            hold, strict = min(hold, at, allowed), min(strict, allowed, at if acting else allowed)
        return _original(plain, hold, self._length), _original(plain, strict, self._length)

    def _release_early(self, new: str, *, looks: bool) -> str:
        """Release the text that is safe between checkpoints; `new` was received last, and nothing has
        looked at it."""
        if self._policy.mode is ASYNC:
            return self._consume(self._length)
        if self._policy.mode is FULL:
            return ""
        limit = self._length
        if self._is_looked_at:
            if not (looks and limit > self._checked and self._look(self._looks, new)):
                limit = self._cleared if self._cleared > self._checked else self._checked
                if limit <= self._released:
                    return ""
            else:
                self._cleared = limit
        if not (self._rules_cut or self._waiting):
            return self._consume(limit)
        scan = self._scan(final=False) if self._rules_cut else _Scan((), limit, limit)
        return self._emit(scan, limit)

    def _look(self, looks: Looks, new: str) -> bool:
        """Whether the text so far is clearly harmless. The verdict, which checkpoints alone make, does
        not change."""
        if not looks.quick:
            if self._length < self._next_look:
                looks.push(new)
                return False
            self._schedule(self._length)
        try:
            return looks.harmless(new)
        except Exception as error:  # the checkpoint decides what follows from it
            _log.error("the classifier failed: %s", type(error).__name__)
            return False

    def _emit(self, scan: _Scan, limit: int) -> str:
        """Release text up to `limit`, with redactions applied and never part of a cut-out span."""
        if not self._waiting and not scan.spans:
            return self._consume(limit if limit < scan.strict_hold else scan.strict_hold)
        strict = [s for s in scan.spans if self._effective_action(s.action) >= REDACT]
        strict = [s for s in _distinct([*self._waiting, *strict]) if s.end > self._released]
        limit = min(limit, scan.strict_hold, *(s.start for s in strict if self._blocks(s)))
        limit = _before_cut_spans(strict, limit)
        pieces = []
        for start, end, category in merged(s for s in strict if s.start < limit):
            pieces += [self._consume(start), f"[{category.upper()}]"]
            self._consume(end)
            self.cuts.append((max(0, start), end))
        pieces.append(self._consume(limit))
        self._waiting = [span for span in self._waiting if span.end > self._released]
        return "".join(pieces)

    def _consume(self, until: int) -> str:
        count = until - self._released
        if count <= 0:
            return ""
        if until == self._length:
            taken, self._raw, self._released = self._raw, "", until
            return taken
        taken, self._raw = self._raw[:count], self._raw[count:]
        self._released += len(taken)
        return taken


def _original(view: View, index: int, end: int) -> int:
    return view.starts[index] if index < len(view.starts) else end


def _before_cut_spans(spans: Sequence[Span], limit: int) -> int:
    """Move a limit back before every span that it would split."""
    for span in sorted(spans, key=lambda each: -each.start):
        if span.start < limit < span.end:
            limit = span.start
    return limit


def _distinct(spans: Sequence[Span]) -> list[Span]:
    return list(dict.fromkeys(spans))
