"""Screens whole texts with rules and classifier; the strictest finding decides.

Synchronous, CPU only, one thread. It reads no clock and writes no log.
"""

import logging
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from moderation.categories import SCORED
from moderation.classifiers.base import Classifier
from moderation.normalise import PLAIN, View, fold
from moderation.policy import Policy, Screen, Stage
from moderation.rules import find_spans, redact
from moderation.scoring import Scored, highest, score_windows
from moderation.verdict import Action, ScreenedText, Span, Verdict

_log = logging.getLogger(__name__)


_NO_SCORES: Mapping[str, float] = dict.fromkeys(SCORED, 0.0)


class Findings(Struct):
    """The findings so far, from which `verdict` is made. `scores` is never changed in place."""

    spans: list[Span] = field(default_factory=list)
    scores: Mapping[str, float] = field(default_factory=lambda: _NO_SCORES)
    flagged: set[str] = field(default_factory=set)
    would: Action = Action.ALLOW
    view: str = PLAIN
    unscanned: set[str] = field(default_factory=set)
    top: float = 0.0

    def add_spans(self, spans: Sequence[Span], view: str) -> None:
        acting = [span for span in spans if span.action > Action.ALLOW]
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
        strictest = Action.ALLOW
        scores = scored.scores
        highest_score = max(scores.values())
        if highest_score >= screen.least_of_all:
            for name, least in screen.least.items():
                if scores[name] >= least:
                    self.flagged.add(name)
                    strictest = max(strictest, screen.categories[name].action(scores[name]))
        if strictest > self.would or (strictest == self.would and highest_score > self.top):
            self.view = scored.view
        if self.scores is _NO_SCORES:
            self.scores = scores
        else:
            known = self.scores
            self.scores = {name: max(known[name], score) for name, score in scores.items()}
        self.top = max(self.top, highest_score)
        self.would = max(self.would, strictest)
        return strictest

    def fail(self, policy: Policy, stage: Stage) -> None:
        """Record a failed stage: unscanned if the policy lets it fail open, otherwise block."""
        if policy.fails_open(stage):
            self.unscanned.add(stage.value)
            return
        self.flagged.add(f"{stage.value}_failed")
        self.would = Action.BLOCK

    def verdict(self, policy: Policy, texts: tuple[str, ...] = ()) -> Verdict:
        shown = min(self.would, Action.ANNOTATE) if policy.shadow else self.would
        return Verdict(
            action=shown,
            would=self.would,
            policy_version=policy.version,
            scores=self.scores,
            flagged=tuple(sorted(self.flagged)),
            view=self.view,
            spans=tuple(self.spans),
            texts=texts,
            unscanned=tuple(sorted(self.unscanned)),
            shadow=policy.shadow,
        )


class Screener:
    """Screens prompts. Without a classifier, only the rules run."""

    def __init__(self, classifier: Classifier | None = None) -> None:
        self.classifier = classifier

    def check_input(self, texts: Sequence[ScreenedText], policy: Policy) -> Verdict:
        """Screen the texts of the policy's roles; all others pass unchanged."""
        findings = Findings()
        cleaned = []
        for index, screened in enumerate(texts):
            if screened.role in policy.roles and screened.text:
                cleaned.append(self._check(findings, screened.text, policy, index))
            else:
                cleaned.append(screened.text)
        return findings.verdict(policy, tuple(cleaned))

    def _check(self, findings: Findings, text: str, policy: Policy, index: int) -> str:
        view = fold(text)
        spans: list[Span] = []
        try:
            spans, deciding = find_spans(policy.input, view, index)
            findings.add_spans(spans, deciding)
        except Exception as error:
            # Only the type: the message of an error may quote the text.
            _log.error("the rules of policy %s failed: %s", policy.version, type(error).__name__)
            findings.fail(policy, Stage.RULES)
        spans += self._classify(findings, view, policy, index)
        return redact(text, spans) if spans and not policy.shadow else text

    def _classify(self, findings: Findings, view: View, policy: Policy, index: int) -> list[Span]:
        if self.classifier is None or not policy.input.categories or not view.text.strip():
            return []
        try:
            scored = score_windows(self.classifier, view.text)
        except Exception as error:
            _log.error("the classifier failed: %s", type(error).__name__)
            findings.fail(policy, Stage.CLASSIFIER)
            return []
        redacted = []
        for window in scored:
            if findings.add_scores(window, policy.input) is Action.REDACT:
                start, end = view.original_span(window.start, window.end)
                redacted.append(Span(index, start, end, "redacted", "classifier", Action.REDACT))
        findings.spans += redacted
        return redacted

    def score(self, text: str) -> Scored:
        """Return the scores of a text without a policy, for /v1/moderations."""
        view = fold(text)
        if self.classifier is None or not view.text.strip():
            return highest([])
        return highest(score_windows(self.classifier, view.text))
