"""Runs the span rules of a screen over both views of a text; returns original offsets."""

from collections.abc import Iterable, Sequence

from moderation.loose import LooseStream
from moderation.matching import Hit
from moderation.normalise import LOOSE, PLAIN, View, lower, spaced
from moderation.policy import Screen
from moderation.verdict import Action, Span


def find_spans(screen: Screen, view: View, index: int = 0) -> tuple[list[Span], str]:
    """Return all spans that rules found, outermost first, and the view with the deciding hit."""
    lowered = lower(view.text) if screen.has_terms else ""
    spans = spans_of(screen, view, lowered, 0, index)
    deciding = PLAIN
    if screen.deny:
        extra = loose_spans(screen, LooseStream.of(view), index)
        deciding = LOOSE if extra and not spans else PLAIN
        spans = list(dict.fromkeys([*spans, *extra]))
    return without_allowed(screen, view, lowered, spans), deciding


def spans_of(screen: Screen, view: View, lowered: str, start: int, index: int) -> list[Span]:
    """Return the spans that the plain view's rules find from view character `start` on."""
    hits: list[Hit] = []
    if screen.any_need is None or screen.any_need.search(view.text, start) is not None:
        text = spaced(view.text)
        hits = [
            hit
            for group in screen.matchers_by_need
            if group[0].may_find(text, start)
            for matcher in group
            for hit in matcher.hits(text, start)
        ]
    if screen.deny:
        hits += screen.terms.find(lowered, start)
    return [_span(view, hit, index) for hit in hits]


def loose_spans(screen: Screen, loose: View, index: int, start: int = 0) -> list[Span]:
    """Return deny-list hits of the loose view; a squeezed term needs a stretched original."""
    hits = screen.loose_terms.find(loose.text, start)
    spans = [(_span(loose, hit, index), hit.least) for hit in hits]
    return [span for span, least in spans if span.end - span.start >= least]


def without_allowed(screen: Screen, view: View, lowered: str, spans: Sequence[Span]) -> list[Span]:
    """Drop the deny-list hits that lie entirely inside an allowed phrase."""
    if not spans:
        return []
    if not screen.allow:
        return sorted(spans, key=_outermost_first)
    allowed = [view.original_span(hit.start, hit.end) for hit in screen.allowed.find(lowered)]
    kept = [
        span
        for span in spans
        if not any(start <= span.start and span.end <= end for start, end in allowed)
    ]
    return sorted(kept, key=_outermost_first)


def _outermost_first(span: Span) -> tuple[int, int, str]:
    return span.start, -span.end, span.rule


def _span(view: View, hit: Hit, index: int) -> Span:
    start, end = view.original_span(hit.start, hit.end)
    return Span(index, start, end, hit.category, hit.rule, hit.action)


def redact(text: str, spans: Iterable[Span]) -> str:
    """Replace every span with its category in brackets; overlapping spans are merged."""
    pieces, position = [], 0
    for start, end, category in merged(spans):
        pieces += [text[position:start], f"[{category.upper()}]"]
        position = end
    return "".join([*pieces, text[position:]])


def merged(spans: Iterable[Span]) -> list[tuple[int, int, str]]:
    """Return the redacted spans in order, overlapping ones joined under the first's category."""
    joined: list[tuple[int, int, str]] = []
    for span in sorted(spans, key=_outermost_first):
        if span.action < Action.REDACT:
            continue
        if joined and span.start < joined[-1][1]:
            start, end, category = joined[-1]
            joined[-1] = (start, max(end, span.end), category)
        else:
            joined.append((span.start, span.end, span.category))
    return joined
