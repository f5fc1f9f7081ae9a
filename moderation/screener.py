"""Screens whole texts with rules and classifier; the strictest finding decides.

Synchronous, CPU only, one thread. It reads no clock and writes no log.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from moderation.categories import SCORED
from moderation.classifiers.base import Classifier
from moderation.normalise import PLAIN, View, fold
from moderation.policy import Policy, Screen, Stage
from moderation.rules import find_spans, redact
from moderation.scoring import Scored, highest, score_windows, scored_groups
from moderation.verdict import ALLOW, ANNOTATE, BLOCK, REDACT, Action, ScreenedText, Span, Verdict

_log = logging.getLogger(__name__)


_MOST_ROWS = 32  # that wait to be added up
TOOLS = "tools"  # the role of their definitions
LEAST_TEXTS = 6  # of fewer, each is looked up on its own
_NO_SCORES: Mapping[str, float] = dict.fromkeys(SCORED, 0.0)
# Shared by all findings that are kept, and never added to.
_NO_SPANS: list[Span] = []
_NO_ROWS: list[Mapping[str, float]] = []
_NO_NAMES: set[str] = set()
_role_of, text_of = attrgetter("role"), attrgetter("text")
_rows_of, _top_of = attrgetter("rows"), attrgetter("top")
_marks_of = attrgetter("spans", "flagged", "unscanned", "would")  # empty where nothing was found


class Findings(Struct):
    """The findings so far, from which `verdict` is made."""

    spans: list[Span] = field(default_factory=list)
    rows: list[Mapping[str, float]] = field(default_factory=list)  # scores of windows
    flagged: set[str] = field(default_factory=set)
    would: Action = ALLOW
    view: str = PLAIN
    unscanned: set[str] = field(default_factory=set)
    top: float = 0.0

    @property
    def scores(self) -> Mapping[str, float]:
        """The highest of each, made of many windows at once."""
        if len(self.rows) > 1:
            self.rows = [highest_of(self.rows)]
        return self.rows[0] if self.rows else _NO_SCORES

    def compact(self) -> "Findings":
        """The same, to be kept and never changed: one row of scores, and nothing for what is empty."""
        return replace(
            self,
            spans=self.spans or _NO_SPANS,
            rows=[self.scores] if self.rows else _NO_ROWS,
            flagged=self.flagged or _NO_NAMES,
            unscanned=self.unscanned or _NO_NAMES,
        )

    def add_spans(self, spans: Sequence[Span], view: str) -> None:
        acting = [span for span in spans if span.action > ALLOW]
        if not acting:
            return
        self.spans += acting
        self.flagged.update(span.category for span in acting)
        strictest = max(span.action for span in acting)
        if strictest > self.would:
            self.view = view
        self.would = max(self.would, strictest)

    def add_scores(self, scored: Scored, screen: Screen) -> Action:
        """Add the scores of one window; return the action that they lead to."""
        strictest = ALLOW
        scores = scored.scores
        highest_score = max(scores.values())
        if highest_score >= screen.least_of_all:
            for name, least in screen.least.items():
                if scores[name] >= least:
                    self.flagged.add(name)
                    strictest = max(strictest, screen.categories[name].action(scores[name]))
        if strictest > self.would or (strictest == self.would and highest_score > self.top):
            self.view = scored.view
        if len(self.rows) >= _MOST_ROWS:
            self.rows = [highest_of(self.rows)]
        self.rows.append(scores)
        if highest_score > self.top:
            self.top = highest_score
        if strictest > self.would:
            self.would = strictest
        return strictest

    def merge(self, other: "Findings", index: int) -> None:
        """Add the findings of text `index`, which were made as those of text 0, but not its scores."""
        if other.spans:
            self.spans += [replace(span, index=index) for span in other.spans]
        if other.flagged or other.unscanned:
            self.flagged |= other.flagged
            self.unscanned |= other.unscanned
        if other.would > self.would or (other.would == self.would and other.top > self.top):
            self.view, self.would = other.view, other.would
        if other.top > self.top:
            self.top = other.top

    def copy(self) -> "Findings":
        """One that grows apart from this one."""
        return replace(
            self,
            spans=list(self.spans),
            rows=list(self.rows),
            flagged=set(self.flagged),
            unscanned=set(self.unscanned),
        )

    def fail(self, policy: Policy, stage: Stage) -> None:
        """Record a failed stage: unscanned if the policy lets it fail open, otherwise block."""
        if policy.fails_open(stage):
            self.unscanned.add(stage.value)
            return
        self.flagged.add(f"{stage.value}_failed")
        self.would = BLOCK

    def verdict(self, policy: Policy, texts: tuple[str, ...] = ()) -> Verdict:
        shown = min(self.would, ANNOTATE) if policy.shadow else self.would
        return Verdict(
            action=shown,
            would=self.would,
            policy_version=policy.version,
            scores=self.scores,
            flagged=tuple(sorted(self.flagged)) if self.flagged else (),
            view=self.view,
            spans=tuple(self.spans) if self.spans else (),
            texts=texts,
            unscanned=tuple(sorted(self.unscanned)) if self.unscanned else (),
            shadow=policy.shadow,
        )


class Screener:
    """Screens prompts. Without a classifier, only the rules run."""

    def __init__(self, classifier: Classifier | None = None) -> None:
        self.classifier = classifier

    def check_input(self, texts: Sequence[ScreenedText], policy: Policy) -> Verdict:
        """Screen the texts of the policy's roles; all others pass unchanged."""
        return self.prepare(texts, policy).run()

    def prepare(
        self, texts: Sequence[ScreenedText], policy: Policy, known: "KnownTexts | None" = None
    ) -> "Screening":
        """A screening that has yet to run; the findings of texts in `known` are reused."""
        return Screening(self, texts, policy, known)

    def findings(self, text: str, policy: Policy) -> Iterator[Findings]:
        """Screen one text in steps; yields the same, growing findings after each step."""
        findings, view = Findings(), fold(text)
        try:
            spans, deciding = find_spans(policy.input, view)
            findings.add_spans(spans, deciding)
        except Exception as error:
            # Only the type: the message of an error may quote the text.
            _log.error("the rules of policy %s failed: %s", policy.version, type(error).__name__)
            findings.fail(policy, Stage.RULES)
        yield findings
        if self.classifier is None or not policy.input.categories or not view.text.strip():
            return
        try:
            for group in scored_groups(self.classifier, view.text):
                for window in group:
                    _add_window(findings, window, view, policy)
                yield findings
        except Exception as error:
            _log.error("the classifier failed: %s", type(error).__name__)
            findings.fail(policy, Stage.CLASSIFIER)
            yield findings

    def score(self, text: str) -> Scored:
        """Return the scores of a text without a policy, for /v1/moderations."""
        view = fold(text)
        if self.classifier is None or not view.text.strip():
            return highest([])
        return highest(score_windows(self.classifier, view.text))


class KnownTexts(Protocol):
    """Findings of texts that were screened before, under one tenant and policy."""

    def get_all(self, texts: Sequence[str]) -> list[Findings | None]: ...

    def put(self, text: str, findings: Findings) -> None: ...

    def longest(self, texts: Sequence[str]) -> tuple[int, Findings | None]: ...

    def put_first(self, count: int, findings: Findings) -> None: ...


class Screening:
    """The screening of one request's texts. `unseen` is its work left, in characters."""

    def __init__(
        self,
        screener: Screener,
        texts: Sequence[ScreenedText],
        policy: Policy,
        known: KnownTexts | None = None,
    ) -> None:
        self._screener = screener
        self._texts = texts
        self._policy = policy
        self._known = known
        roles, read = set(map(_role_of, texts)), list(map(text_of, texts))
        screened = {role for role in roles if policy.screens(role)}
        if len(screened) < len(roles):
            read = [each.text if each.role in screened else "" for each in texts]
        self._turns = len(read)  # before the definitions of tools, which each turn repeats
        while self._turns and texts[self._turns - 1].role == TOOLS:
            self._turns -= 1
        begun, self._begun = 0, None
        found: list[Findings | None] = []
        if known is not None and self._turns > LEAST_TEXTS:
            begun, self._begun = known.longest(read[: self._turns])
        asked = list(compress(range(begun, len(read)), read[begun:]))
        if known is not None:
            found = known.get_all(list(filter(None, read[begun:])))
        else:
            found = [None] * len(asked)
        self._begun_texts = begun
        self._new: list[int] = []
        self._found: dict[int, Findings] = {}
        self.unseen = 0
        for number, index in enumerate(asked):
            if (each := found[number]) is None:
                self._new.append(index)
                self.unseen += len(texts[index].text)
            else:
                self._found[index] = each
        self._steps = self._work()

    def run(self) -> Verdict:
        while self.step():
            continue
        return self.verdict()

    def step(self) -> bool:
        """Do a small part of the work, a millisecond or two; False when all is done."""
        return next(self._steps, None) is not None

    def _work(self) -> Iterator[Findings]:
        for index in self._new:
            text = self._texts[index].text
            found = Findings()
            for found in self._screener.findings(text, self._policy):
                yield found
            self._found[index] = found
            if self._known is not None:
                self._known.put(text, found)

    def verdict(self) -> Verdict:
        findings = Findings()
        rows: list[Mapping[str, float]] = []
        if self._begun is not None:
            findings, rows = self._begun.copy(), list(self._begun.rows)
        found = sorted(self._found.items())
        if self._turns > LEAST_TEXTS:
            for count in (self._turns - 1, self._turns):
                _merge(findings, rows, [each for each in found if each[0] < count])
                found = [each for each in found if each[0] >= count]
                self._remember(count, findings, rows)
        _merge(findings, rows, found)
        findings.rows = rows
        return findings.verdict(self._policy, self._cleaned(findings))

    def _remember(self, count: int, findings: Findings, rows: list[Mapping[str, float]]) -> None:
        """Keep the findings of the first `count` texts, for the turn that follows."""
        if self._known is not None and count > self._begun_texts:
            kept = findings.copy()
            kept.rows = [highest_of(rows)] if len(rows) > 1 else list(rows)
            self._known.put_first(count, kept)

    def _cleaned(self, findings: Findings) -> tuple[str, ...]:
        cleaned = list(map(text_of, self._texts))
        if findings.spans and not self._policy.shadow:
            by_text: dict[int, list[Span]] = {}
            for span in findings.spans:
                by_text.setdefault(span.index, []).append(span)
            for index, spans in by_text.items():
                cleaned[index] = redact(cleaned[index], spans)
        return tuple(cleaned)


def _merge(
    findings: Findings,
    rows: list[Mapping[str, float]],
    found: Sequence[tuple[int, Findings]],
) -> None:
    of_texts = list(map(itemgetter(1), found))
    rows += chain.from_iterable(map(_rows_of, of_texts))
    if any(chain.from_iterable(map(_marks_of, of_texts))):
        for index, each in found:
            findings.merge(each, index)
    elif of_texts:  # nothing was found: the highest score alone matters
        findings.merge(max(of_texts, key=_top_of), 0)


def highest_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The highest of each score; all mappings have the names of SCORED in their order."""
    values = map(max, *[scores.values() for scores in rows])
    return dict(zip(SCORED, values, strict=True))


def _add_window(findings: Findings, window: Scored, view: View, policy: Policy) -> None:
    if findings.add_scores(window, policy.input) is REDACT:
        start, end = view.original_span(window.start, window.end)
        span = Span(0, start, end, "redacted", "classifier", REDACT)
        findings.spans.append(span)
