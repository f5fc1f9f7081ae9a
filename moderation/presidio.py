"""Optional: Microsoft Presidio as another source of personal-data spans (names, places, dates).

The operator installs the extra `presidio` and a spaCy model; they are imported only by
`make_analyzer`. Presidio reads whole texts, so it supports inputs and outputs in mode `full`, not
windows.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from core.extras import imports_of
from moderation.errors import BadPolicy
from moderation.verdict import Action, Span

_KINDS = {
    "PERSON": "person",
    "LOCATION": "location",
    "NRP": "organisation",
    "ORGANIZATION": "organisation",
    "DATE_TIME": "date",
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "CREDIT_CARD": "card",
    "IBAN_CODE": "iban",
    "US_SSN": "us_ssn",
    "IP_ADDRESS": "ip",
}


class Analyzer(Protocol):
    """The part of presidio_analyzer.AnalyzerEngine that is used."""

    def analyze(self, *, text: str, language: str, entities: list[str]) -> list[Any]: ...


def make_analyzer() -> Analyzer:
    """Return Presidio's engine. Raises an error that says what to install."""
    with imports_of("presidio", "Presidio", BadPolicy):
        from presidio_analyzer import AnalyzerEngine
    engine: Analyzer = AnalyzerEngine()
    return engine


def presidio_spans(
    analyzer: Analyzer,
    text: str,
    actions: Mapping[str, Action],
    *,
    index: int = 0,
    at_least: float = 0.5,
    language: str = "en",
) -> list[Span]:
    """Return spans of the kinds with an action, with Presidio's score `at_least` or higher."""
    wanted = [name for name, kind in _KINDS.items() if actions.get(kind, Action.ALLOW) > 0]
    if not wanted:
        return []
    found = analyzer.analyze(text=text, language=language, entities=wanted)
    return [
        Span(
            index,
            each.start,
            each.end,
            _KINDS[each.entity_type],
            "presidio",
            actions[_KINDS[each.entity_type]],
        )
        for each in sorted(found, key=lambda one: (one.start, -one.end))
        if each.score >= at_least and each.entity_type in wanted
    ]
