"""Reads and writes policies as JSON. An unknown field is refused with its path, never ignored."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

from moderation.categories import ENTITY_KINDS, SCORED
from moderation.errors import BadPolicy
from moderation.patterns import DEFAULT_LONGEST, LONGEST_MATCH, compile_pattern
from moderation.policy import (
    Mode,
    Payer,
    Policy,
    Screen,
    SecondStage,
    Stage,
    StrikeRule,
    TenantPattern,
    Thresholds,
    default_policy,
)
from moderation.terms import LONGEST_TERM, MOST_TERMS, Term, term_key
from moderation.verdict import Action

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MOST_PATTERNS = 200

Choice = TypeVar("Choice", bound=StrEnum)
PolicyType = TypeVar("PolicyType", bound=Policy)


def read_policy(made: type[PolicyType], document: Mapping[str, Any]) -> PolicyType:
    """Read a policy document. Raises BadPolicy with the path of the first invalid value and the
    allowed values."""
    fields = {"input": {}, "output": {}, **_object(document, "policy", _POLICY_FIELDS)}
    arguments = {name: _POLICY_FIELDS[name](value, name) for name, value in fields.items()}
    return made(**arguments)


def to_dict(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "input": _screen_to_dict(policy.input),
        "output": _screen_to_dict(policy.output),
        "roles": sorted(policy.roles),
        "mode": policy.mode.value,
        "shadow": policy.shadow,
        "on_error": {stage.value: word for stage, word in policy.on_error.items()},
        "blocked_input_paid_by": policy.blocked_input_paid_by.value,
        "cut_output_paid_by": policy.cut_output_paid_by.value,
        "second_stage": _slots_to_dict(policy.second_stage),
        "strikes": _slots_to_dict(policy.strikes),
    }


def _slots_to_dict(value: SecondStage | StrikeRule | None) -> dict[str, Any] | None:
    if value is None:
        return None
    told = {name: getattr(value, name) for name in value.__slots__}
    # Left out when off, so that policies without the field keep their version.
    return {name: each for name, each in told.items() if (name, each) != ("answers", False)}


def _screen_to_dict(screen: Screen) -> dict[str, Any]:
    return {
        "categories": {
            name: {
                word: at
                for word in ("annotate", "redact", "block")
                if (at := getattr(thresholds, word)) is not None
            }
            for name, thresholds in screen.categories.items()
        },
        "entities": {kind: action.word for kind, action in screen.entities.items()},
        "deny": [
            {"text": term.text, "action": term.action.word, "category": term.category}
            for term in screen.deny
        ],
        "allow": list(screen.allow),
        "patterns": [
            {
                "name": each.name,
                "pattern": each.source,
                "action": each.action.word,
                "longest": each.longest,
            }
            for each in screen.patterns
        ],
    }


def _object(value: Any, place: str, known: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadPolicy(f"{place}: expected an object, not {_named(value)}", param=place)
    for name in value:
        if name not in known:
            raise BadPolicy(
                f"{place}: unknown field or category {name!r}",
                next_step=f"Use one of: {', '.join(known)}.",
                param=place,
            )
    return value


def _list(value: Any, place: str, most: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadPolicy(f"{place}: expected a list, not {_named(value)}", param=place)
    if len(value) > most:
        raise BadPolicy(f"{place}: {len(value)} entries; at most {most} are allowed", param=place)
    return list(value)


def _named(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _text(value: Any, place: str, most: int = 200) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadPolicy(f"{place}: expected a string that is not empty", param=place)
    if len(value) > most:
        raise BadPolicy(
            f"{place}: {len(value)} characters; at most {most} are allowed", param=place
        )
    return value


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise BadPolicy(f"{place}: expected true or false, not {_named(value)}", param=place)
    return value


def _number(value: Any, place: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadPolicy(f"{place}: expected a number from {low} to {high}", param=place)
    return value


def _whole(value: Any, place: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadPolicy(f"{place}: expected a whole number from {low} to {high}", param=place)
    return value


def _one_of(kind: type[Choice]) -> Callable[[Any, str], Choice]:
    def read(value: Any, place: str) -> Choice:
        try:
            return kind(value)
        except ValueError:
            words = ", ".join(kind)
            raise BadPolicy(f"{place}: {value!r} is none of: {words}", param=place) from None

    return read


def _action(value: Any, place: str) -> Action:
    words = [action.word for action in Action]
    if value not in words:
        raise BadPolicy(f"{place}: {value!r} is none of: {', '.join(words)}", param=place)
    return Action.parse(value)


def _thresholds(value: Any, place: str) -> Thresholds:
    fields = _object(value, place, dict.fromkeys(("annotate", "redact", "block")))
    numbers = {
        word: None if at is None else _number(at, f"{place}.{word}", 0.0, 1.0)
        for word, at in fields.items()
    }
    return Thresholds(**numbers)


def _term(value: Any, place: str) -> Term:
    fields = {"text": value} if isinstance(value, str) else value
    fields = _object(fields, place, dict.fromkeys(("text", "action", "category")))
    text = _text(fields.get("text"), f"{place}.text", LONGEST_TERM)
    if not term_key(text):
        raise BadPolicy(f"{place}.text: it is empty after normalisation", param=place)
    action = _action(fields.get("action", "block"), f"{place}.action")
    return Term(text, action, _text(fields.get("category", "deny_list"), f"{place}.category", 64))


def _pattern(value: Any, place: str) -> TenantPattern:
    fields = _object(value, place, dict.fromkeys(("name", "pattern", "action", "longest")))
    name = _text(fields.get("name"), f"{place}.name", 64)
    source = _text(fields.get("pattern"), f"{place}.pattern", 10_000)
    try:
        compile_pattern(source)
    except BadPolicy as error:
        raise type(error)(f"{place} ({name}): {error.message}", param=place) from None
    action = _action(fields.get("action", "block"), f"{place}.action")
    longest = _whole(fields.get("longest", DEFAULT_LONGEST), f"{place}.longest", 1, LONGEST_MATCH)
    return TenantPattern(name, source, action, longest)


def _screen(value: Any, place: str) -> Screen:
    known = ("categories", "entities", "deny", "allow", "patterns")
    fields = _object(value, place, dict.fromkeys(known))
    # Missing fields have their defaults: a policy with only a deny list keeps the classifier.
    usual = _screen_to_dict(default_policy().input)
    categories = fields.get("categories", usual["categories"])
    entities = fields.get("entities", usual["entities"])
    _object(categories, f"{place}.categories", dict.fromkeys(SCORED))
    _object(entities, f"{place}.entities", dict.fromkeys(ENTITY_KINDS))
    deny = _list(fields.get("deny", []), f"{place}.deny", MOST_TERMS)
    allow = _list(fields.get("allow", []), f"{place}.allow", MOST_TERMS)
    patterns = _list(fields.get("patterns", []), f"{place}.patterns", MOST_PATTERNS)
    return Screen(
        categories=MappingProxyType(
            {k: _thresholds(v, f"{place}.categories.{k}") for k, v in categories.items()}
        ),
        entities=MappingProxyType(
            {k: _action(v, f"{place}.entities.{k}") for k, v in entities.items()}
        ),
        deny=tuple(_term(v, f"{place}.deny[{i}]") for i, v in enumerate(deny)),
        allow=tuple(_text(v, f"{place}.allow[{i}]", LONGEST_TERM) for i, v in enumerate(allow)),
        patterns=tuple(_pattern(v, f"{place}.patterns[{i}]") for i, v in enumerate(patterns)),
    )


def _roles(value: Any, place: str) -> frozenset[str]:
    for role in (roles := _list(value, place, 10)):
        if role not in KNOWN_ROLES:
            words = ", ".join(sorted(KNOWN_ROLES))
            raise BadPolicy(f"{place}: {role!r} is none of: {words}", param=place)
    return frozenset(roles)


def _on_error(value: Any, place: str) -> Mapping[Stage, str]:
    fields = _object(value, place, dict.fromkeys(stage.value for stage in Stage))
    for stage, word in fields.items():
        if word not in ("open", "closed"):
            raise BadPolicy(f"{place}.{stage}: {word!r} is neither open nor closed", param=place)
    return MappingProxyType({stage: str(fields.get(stage.value, "closed")) for stage in Stage})


def _second_stage(value: Any, place: str) -> SecondStage | None:
    if value is None:
        return None
    fields = _object(value, place, dict.fromkeys(SecondStage.__slots__))
    low = _number(fields.get("low", 0.3), f"{place}.low", 0.0, 1.0)
    high = _number(fields.get("high", 0.9), f"{place}.high", 0.0, 1.0)
    if low >= high:
        raise BadPolicy(f"{place}: low ({low}) must be under high ({high})", param=place)
    deadline = _whole(fields.get("deadline_ms", 2_000), f"{place}.deadline_ms", 1, 60_000)
    answers = _flag(fields.get("answers", False), f"{place}.answers")
    return SecondStage(_text(fields.get("guard"), f"{place}.guard"), low, high, deadline, answers)


def _strikes(value: Any, place: str) -> StrikeRule | None:
    if value is None:
        return None
    fields = _object(value, place, dict.fromkeys(StrikeRule.__slots__))
    limit = _whole(fields.get("limit"), f"{place}.limit", 1, 10_000)
    hours = _whole(fields.get("window_hours", 24), f"{place}.window_hours", 1, 24 * 90)
    return StrikeRule(limit, hours)


_POLICY_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "name": _text,
    "input": _screen,
    "output": _screen,
    "roles": _roles,
    "mode": _one_of(Mode),
    "shadow": _flag,
    "on_error": _on_error,
    "blocked_input_paid_by": _one_of(Payer),
    "cut_output_paid_by": _one_of(Payer),
    "second_stage": _second_stage,
    "strikes": _strikes,
}
