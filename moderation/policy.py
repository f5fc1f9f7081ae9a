"""A policy: what to look for, in which roles' texts, and what to do then. Frozen and versioned.

The version is the digest of the policy's own document, so the same rules have the same version
everywhere and a decision can always be traced to the rules that made it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Any, Self

from moderation.categories import HEADS
from moderation.defaults import DEFAULT_ANNOTATE_AT, DEFAULT_BLOCK_AT
from moderation.entities import entity_matchers
from moderation.patterns import DEFAULT_MATCH_LENGTH, PatternMatcher
from moderation.terms import Term, TermMatcher, loose_terms
from moderation.verdict import Action

# Whose texts of a prompt are screened. `tools` are the definitions of tools and answer formats; a
# tool call belongs to the assistant's turn that makes it.
ALL_ROLES = frozenset({"system", "user", "assistant", "tool", "tools"})
# Chat templates render these as the other role, so a policy cannot tell them apart.
SAME_ROLE: Mapping[str, str] = MappingProxyType({"developer": "system", "function": "tool"})

# Characters of an answer, at most, between two verdicts of the classifier.
LONGEST_HOLD, SHORTEST_HOLD = 256, 32
_EARLY_FACTOR = 0.5  # of the lowest threshold that redacts or blocks


class Mode(StrEnum):
    """How an answer is guarded: not at all, held per window, held whole, or only annotated."""

    OFF = "off"
    WINDOW = "window"
    FULL = "full"
    ASYNC = "async"


# As in `verdict`: what requests ask often is looked up in a module, not in a class.
OFF, WINDOW, FULL, ASYNC = Mode.OFF, Mode.WINDOW, Mode.FULL, Mode.ASYNC


class Stage(StrEnum):
    RULES = "rules"
    CLASSIFIER = "classifier"
    GUARD = "guard"


class Payer(StrEnum):
    TENANT = "tenant"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The lowest scores at which a category is annotated, redacted or blocked; None means never."""

    annotate: float | None = None
    redact: float | None = None
    block: float | None = None

    def action(self, score: float) -> Action:
        for threshold, action in (
            (self.block, Action.BLOCK),
            (self.redact, Action.REDACT),
            (self.annotate, Action.ANNOTATE),
        ):
            if threshold is not None and score >= threshold:
                return action
        return Action.ALLOW


@dataclass(frozen=True, slots=True)
class TenantPattern:
    name: str
    source: str
    action: Action = Action.BLOCK
    longest: int = DEFAULT_MATCH_LENGTH


@dataclass(frozen=True)
class Screen:
    """The rules of one direction, input or output."""

    categories: Mapping[str, Thresholds] = field(default_factory=dict)
    entities: Mapping[str, Action] = field(default_factory=dict)
    deny: tuple[Term, ...] = ()
    allow: tuple[str, ...] = ()
    patterns: tuple[TenantPattern, ...] = ()

    @cached_property
    def matchers(self) -> tuple[PatternMatcher, ...]:
        """The rules that read the plain view; patterns and entities see its letter case."""
        patterns = [
            PatternMatcher(each.name, each.source, each.action, longest=each.longest)
            for each in self.patterns
        ]
        return (*entity_matchers(self.entities), *patterns)

    @cached_property
    def matchers_by_need(self) -> tuple[tuple[PatternMatcher, ...], ...]:
        """The matchers grouped by `needs`: one check tells whether a text may match any of them."""
        groups: dict[tuple[str, ...], list[PatternMatcher]] = {}
        for matcher in self.matchers:
            groups.setdefault(matcher.needs, []).append(matcher)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def holds_acting(self) -> bool:
        """Whether a pattern that redacts or blocks may hold text back."""
        return any(acts for _, acts in self.hold_matchers)

    @cached_property
    def hold_matchers(self) -> tuple[tuple[PatternMatcher, bool], ...]:
        """The matchers whose `hold` must be asked, and whether they redact or block: of those with the
        same head and action, only the one with the longest match, whose hold includes the others'."""
        found: dict[tuple[re.Pattern[str] | None, Action], PatternMatcher] = {}
        for matcher in self.matchers:
            known = found.get((matcher.head, matcher.action))
            if known is None or matcher.longest > known.longest:
                found[matcher.head, matcher.action] = matcher
        return tuple([(each, each.action > Action.ANNOTATE) for each in found.values()])

    @cached_property
    def any_need(self) -> re.Pattern[str] | None:
        """What a text without any match lacks; None where some matcher may match any text."""
        needs = [matcher.needs for matcher in self.matchers]
        if not all(needs):
            return None
        return re.compile("|".join(dict.fromkeys(re.escape(each) for of in needs for each in of)))

    @cached_property
    def has_terms(self) -> bool:
        return bool(self.deny or self.allow)

    @cached_property
    def terms(self) -> TermMatcher:
        return TermMatcher(self.deny)

    @cached_property
    def loose_terms(self) -> TermMatcher:
        return TermMatcher(loose_terms(self.deny))

    @cached_property
    def allowed(self) -> TermMatcher:
        return TermMatcher(tuple(Term(text, Action.ALLOW, "allow_list") for text in self.allow))

    @cached_property
    def least(self) -> Mapping[str, float]:
        """By category, the lowest score that leads to any action."""
        given = {
            name: [at for at in (each.annotate, each.redact, each.block) if at is not None]
            for name, each in self.categories.items()
        }
        return {name: min(ats) for name, ats in given.items() if ats}

    @cached_property
    def least_of_all(self) -> float:
        """The lowest score that leads to any action in any category."""
        return min(self.least.values(), default=inf)

    @cached_property
    def clearly_harmless(self) -> Mapping[str, float]:
        """By category that may redact or block, the scores below which an answer's text is released
        before its checkpoint."""
        given = {
            name: [at for at in (each.redact, each.block) if at is not None]
            for name, each in self.categories.items()
        }
        return {name: _EARLY_FACTOR * min(ats) for name, ats in given.items() if ats}

    @cached_property
    def harmless_heads(self) -> tuple[float, ...]:
        """By head, the lowest of `clearly_harmless`: no score is above that of its head."""
        limits = dict.fromkeys(HEADS, inf)
        for name, at in self.clearly_harmless.items():
            head = name.partition("/")[0]
            limits[head] = min(at, limits[head])
        return tuple(limits.values())

    @cached_property
    def strictest(self) -> Action:
        """The strictest action that the classifier's scores can lead to."""
        found = Action.ALLOW
        for each in self.categories.values():
            for threshold, action in (
                (each.annotate, Action.ANNOTATE),
                (each.redact, Action.REDACT),
                (each.block, Action.BLOCK),
            ):
                if threshold is not None and action > found:
                    found = action
        return found


@dataclass(frozen=True, slots=True)
class SecondStage:
    """A guard model judges texts with a score between `low` and `high`, within `deadline_ms`.

    With `answers` it also judges answers, each of which is held until it is complete and judged.
    """

    guard: str
    low: float = 0.3
    high: float = 0.9
    deadline_ms: int = 2_000
    answers: bool = False


@dataclass(frozen=True, slots=True)
class StrikeRule:
    """A key is suspended after `limit` blocked requests within `window_hours`."""

    limit: int
    window_hours: int = 24


@dataclass(frozen=True)
class Policy:
    """The moderation rules of a tenant, project or key."""

    name: str = "default"
    input: Screen = field(default_factory=Screen)
    output: Screen = field(default_factory=Screen)
    roles: frozenset[str] = ALL_ROLES
    mode: Mode = Mode.WINDOW
    shadow: bool = False
    on_error: Mapping[Stage, str] = field(
        default_factory=lambda: MappingProxyType(dict.fromkeys(Stage, "closed"))
    )
    blocked_input_paid_by: Payer = Payer.OPERATOR
    cut_output_paid_by: Payer = Payer.TENANT
    second_stage: SecondStage | None = None
    strikes: StrikeRule | None = None
    longest_hold: int = LONGEST_HOLD  # characters of an answer that wait for the classifier at most

    @cached_property
    def _screened(self) -> frozenset[str]:
        return frozenset(SAME_ROLE.get(role, role) for role in self.roles)

    def screens(self, role: str) -> bool:
        """Whether texts of this role are screened."""
        return SAME_ROLE.get(role, role) in self._screened

    @cached_property
    def version(self) -> str:
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return "pol_" + hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read a JSON document. Raises BadPolicy with the path of the first invalid value."""
        from moderation.policy_document import read_policy

        return read_policy(cls, document)

    def to_dict(self) -> dict[str, Any]:
        from moderation.policy_document import to_dict

        return to_dict(self)

    def fails_open(self, stage: Stage) -> bool:
        return self.on_error.get(stage, "closed") == "open"


def default_policy() -> Policy:
    """Annotates at the thresholds of the model card's calibration; blocks only at high scores."""
    thresholds = MappingProxyType(
        {
            category: Thresholds(annotate=at, block=DEFAULT_BLOCK_AT.get(category))
            for category, at in DEFAULT_ANNOTATE_AT.items()
        }
    )
    entities = MappingProxyType(
        dict.fromkeys(("card", "iban", "us_ssn", "api_key", "private_key"), Action.ANNOTATE)
    )
    screen = Screen(categories=thresholds, entities=entities)
    return Policy(input=screen, output=screen)
