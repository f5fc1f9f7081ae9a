"""Reads and writes policies as JSON. An unknown field is refused with its path, never ignored."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

from moderation.categories import ENTITY_KINDS, RETIRED_ENTITY_KINDS, SCORED
from moderation.errors import BadPolicy
from moderation.patterns import DEFAULT_MATCH_LENGTH, MAX_MATCH_LENGTH, compile_pattern
from moderation.policy import (
    ALL_ROLES,
    LONGEST_HOLD,
    SAME_ROLE,
    SHORTEST_HOLD,
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

KNOWN_ROLES = ALL_ROLES | frozenset(SAME_ROLE)
MAX_PATTERNS = 200

Choice = TypeVar("Choice", bound=StrEnum)
PolicyType = TypeVar("PolicyType", bound=Policy)


def read_policy(policy_type: type[PolicyType], document: Mapping[str, Any]) -> PolicyType:
    """Read a policy document. Raises BadPolicy with the path of the first invalid value and the
    allowed values."""
    fields = {"input": {}, "output": {}, **_object(document, "policy", _POLICY_FIELDS)}
    arguments = {name: _POLICY_FIELDS[name](value, name) for name, value in fields.items()}
    return policy_type(**arguments)


def to_dict(policy: Policy) -> dict[str, Any]:
    document = {
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
    if policy.longest_hold != LONGEST_HOLD:  # else as policies without it, which keep their version
        document["longest_hold"] = policy.longest_hold
    return document


def _slots_to_dict(value: SecondStage | StrikeRule | None) -> dict[str, Any] | None:
    if value is None:
        return None
    fields = {name: getattr(value, name) for name in value.__slots__}
    # Left out when off, so that policies without the field keep their version.
    return {name: each for name, each in fields.items() if (name, each) != ("answers", False)}


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


def _object(value: Any, path: str, known: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadPolicy(f"{path}: expected an object, not {_type_name(value)}", param=path)
    for name in value:
        if name not in known:
            raise BadPolicy(
                f"{path}: unknown field or category {name!r}",
                next_step=f"Use one of: {', '.join(known)}.",
                param=path,
            )
    return value


def _list(value: Any, path: str, limit: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise BadPolicy(f"{path}: expected a list, not {_type_name(value)}", param=path)
    if len(value) > limit:
        raise BadPolicy(f"{path}: {len(value)} entries; at most {limit} are allowed", param=path)
    return list(value)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _text(value: Any, path: str, limit: int = 200) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadPolicy(f"{path}: expected a string that is not empty", param=path)
    if len(value) > limit:
        raise BadPolicy(f"{path}: {len(value)} characters; at most {limit} are allowed", param=path)
    return value


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise BadPolicy(f"{path}: expected true or false, not {_type_name(value)}", param=path)
    return value


def _number(value: Any, path: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadPolicy(f"{path}: expected a number from {low} to {high}", param=path)
    return value


def _integer(value: Any, path: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadPolicy(f"{path}: expected a whole number from {low} to {high}", param=path)
    return value


def _one_of(kind: type[Choice]) -> Callable[[Any, str], Choice]:
    def read(value: Any, path: str) -> Choice:
        try:
            return kind(value)
        except ValueError:
            words = ", ".join(kind)
            raise BadPolicy(f"{path}: {value!r} is none of: {words}", param=path) from None

    return read


def _action(value: Any, path: str) -> Action:
    words = [action.word for action in Action]
    if value not in words:
        raise BadPolicy(f"{path}: {value!r} is none of: {', '.join(words)}", param=path)
    return Action.parse(value)


def _thresholds(value: Any, path: str) -> Thresholds:
    fields = _object(value, path, dict.fromkeys(("annotate", "redact", "block")))
    numbers = {
        word: None if at is None else _number(at, f"{path}.{word}", 0.0, 1.0)
        for word, at in fields.items()
    }
    return Thresholds(**numbers)


def _term(value: Any, path: str) -> Term:
    fields = {"text": value} if isinstance(value, str) else value
    fields = _object(fields, path, dict.fromkeys(("text", "action", "category")))
    text = _text(fields.get("text"), f"{path}.text", LONGEST_TERM)
    if not term_key(text):
        raise BadPolicy(f"{path}.text: it is empty after normalisation", param=path)
    action = _action(fields.get("action", "block"), f"{path}.action")
    return Term(text, action, _text(fields.get("category", "deny_list"), f"{path}.category", 64))


def _pattern(value: Any, path: str) -> TenantPattern:
    fields = _object(value, path, dict.fromkeys(("name", "pattern", "action", "longest")))
    name = _text(fields.get("name"), f"{path}.name", 64)
    source = _text(fields.get("pattern"), f"{path}.pattern", 10_000)
    try:
        compile_pattern(source)
    except BadPolicy as error:
        raise type(error)(f"{path} ({name}): {error.message}", param=path) from None
    action = _action(fields.get("action", "block"), f"{path}.action")
    longest = _integer(
        fields.get("longest", DEFAULT_MATCH_LENGTH), f"{path}.longest", 1, MAX_MATCH_LENGTH
    )
    return TenantPattern(name, source, action, longest)


def _screen(value: Any, path: str) -> Screen:
    known = ("categories", "entities", "deny", "allow", "patterns")
    fields = _object(value, path, dict.fromkeys(known))
    # Missing fields have their defaults: a policy with only a deny list keeps the classifier.
    usual = _screen_to_dict(default_policy().input)
    categories = fields.get("categories", usual["categories"])
    entities = fields.get("entities", usual["entities"])
    _object(categories, f"{path}.categories", dict.fromkeys(SCORED))
    _object(entities, f"{path}.entities", dict.fromkeys((*ENTITY_KINDS, *RETIRED_ENTITY_KINDS)))
    deny = _list(fields.get("deny", []), f"{path}.deny", MOST_TERMS)
    allow = _list(fields.get("allow", []), f"{path}.allow", MOST_TERMS)
    patterns = _list(fields.get("patterns", []), f"{path}.patterns", MAX_PATTERNS)
    return Screen(
        categories=MappingProxyType(
            {k: _thresholds(v, f"{path}.categories.{k}") for k, v in categories.items()}
        ),
        entities=MappingProxyType(
            {k: _action(v, f"{path}.entities.{k}") for k, v in entities.items()}
        ),
        deny=tuple(_term(v, f"{path}.deny[{i}]") for i, v in enumerate(deny)),
        allow=tuple(_text(v, f"{path}.allow[{i}]", LONGEST_TERM) for i, v in enumerate(allow)),
        patterns=tuple(_pattern(v, f"{path}.patterns[{i}]") for i, v in enumerate(patterns)),
    )


def _roles(value: Any, path: str) -> frozenset[str]:
    for role in (roles := _list(value, path, 10)):
        if role not in KNOWN_ROLES:
            words = ", ".join(sorted(KNOWN_ROLES))
            raise BadPolicy(f"{path}: {role!r} is none of: {words}", param=path)
    return frozenset(roles)


def _on_error(value: Any, path: str) -> Mapping[Stage, str]:
    fields = _object(value, path, dict.fromkeys(stage.value for stage in Stage))
    for stage, word in fields.items():
        if word not in ("open", "closed"):
            raise BadPolicy(f"{path}.{stage}: {word!r} is neither open nor closed", param=path)
    return MappingProxyType({stage: str(fields.get(stage.value, "closed")) for stage in Stage})


def _second_stage(value: Any, path: str) -> SecondStage | None:
    if value is None:
        return None
    fields = _object(value, path, dict.fromkeys(SecondStage.__slots__))
    low = _number(fields.get("low", 0.3), f"{path}.low", 0.0, 1.0)
    high = _number(fields.get("high", 0.9), f"{path}.high", 0.0, 1.0)
    if low >= high:
        raise BadPolicy(f"{path}: low ({low}) must be under high ({high})", param=path)
    deadline = _integer(fields.get("deadline_ms", 2_000), f"{path}.deadline_ms", 1, 60_000)
    answers = _boolean(fields.get("answers", False), f"{path}.answers")
    return SecondStage(_text(fields.get("guard"), f"{path}.guard"), low, high, deadline, answers)


def _strikes(value: Any, path: str) -> StrikeRule | None:
    if value is None:
        return None
    fields = _object(value, path, dict.fromkeys(StrikeRule.__slots__))
    limit = _integer(fields.get("limit"), f"{path}.limit", 1, 10_000)
    hours = _integer(fields.get("window_hours", 24), f"{path}.window_hours", 1, 24 * 90)
    return StrikeRule(limit, hours)


def _longest_hold(value: Any, path: str) -> int:
    return _integer(value, path, SHORTEST_HOLD, LONGEST_HOLD)


_POLICY_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "name": _text,
    "input": _screen,
    "output": _screen,
    "roles": _roles,
    "mode": _one_of(Mode),
    "shadow": _boolean,
    "on_error": _on_error,
    "blocked_input_paid_by": _one_of(Payer),
    "cut_output_paid_by": _one_of(Payer),
    "second_stage": _second_stage,
    "strikes": _strikes,
    "longest_hold": _longest_hold,
}
