"""Virtual models: names that stand for a pool of served models, from TOLLHOUSE_VIRTUAL_MODELS.

A name is an alias ("fast": "small"), a list of models in the order in which they are tried, or an
object with `models` and how one is chosen: `ordered`, `weighted` (a conversation stays where it began)
or `cheapest` by the price of this request. A model of a pool may have a condition; of those whose
condition holds one is chosen, and the others are its fallbacks.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import BadRequest, SettingError
from core.labels import check_label

ORDERED, WEIGHTED, CHEAPEST = "ordered", "weighted", "cheapest"
_MODES = (ORDERED, WEIGHTED, CHEAPEST)
_MOST_MODELS = 32
_MOST_WEIGHT = 1_000_000
_LONGEST_NAME = 120


@dataclass(frozen=True, slots=True)
class Facts:
    """What a condition reads of a request."""

    tenants: frozenset[str]  # the tenant's id and name
    labels: frozenset[str]  # each like team=search
    tokens: int  # of the prompt, estimated from its text
    tools: bool | None = False  # None: it is not known, and such a condition does not hold
    images: bool | None = False


@dataclass(frozen=True, slots=True)
class Condition:
    tenants: frozenset[str] = frozenset()  # one of these; empty: any
    labels: frozenset[str] = frozenset()  # all of these
    tokens_from: int = 0
    tokens_below: int | None = None
    tools: bool | None = None  # None: with or without
    images: bool | None = None

    def holds(self, facts: Facts) -> bool:
        return (
            (not self.tenants or not self.tenants.isdisjoint(facts.tenants))
            and self.labels <= facts.labels
            and self.tokens_from <= facts.tokens
            and (self.tokens_below is None or facts.tokens < self.tokens_below)
            and (self.tools is None or self.tools is facts.tools)
            and (self.images is None or self.images is facts.images)
        )


@dataclass(frozen=True, slots=True)
class Member:
    model: str
    weight: int = 1
    when: Condition = Condition()


@dataclass(frozen=True, slots=True)
class VirtualModel:
    name: str
    members: tuple[Member, ...]
    mode: str = ORDERED

    def ranked(self, facts: Facts, point: float, cost: Callable[[str], int | None]) -> list[str]:
        """The models whose condition holds, the chosen one first. `point` (0 to 100) is the
        conversation's; `cost` is None for a model without a price."""
        fitting = [each for each in self.members if each.when.holds(facts)]
        if self.mode == WEIGHTED and fitting:
            fitting = _by_weight(fitting, point)
        elif self.mode == CHEAPEST:
            costs = {each.model: cost(each.model) for each in fitting}
            fitting.sort(key=lambda each: (costs[each.model] is None, costs[each.model] or 0))
        return list(dict.fromkeys(each.model for each in fitting))


def _by_weight(fitting: Sequence[Member], point: float) -> list[Member]:
    """The one in whose share the point lies, then the others by weight."""
    at = point / 100 * sum(each.weight for each in fitting)
    below, chosen = 0, fitting[-1]
    for each in fitting:
        below += each.weight
        if at < below:
            chosen = each
            break
    others = sorted((each for each in fitting if each is not chosen), key=lambda e: -e.weight)
    return [chosen, *others]


def read_virtual_models(setting: str) -> dict[str, VirtualModel]:
    """By name. SettingError says what is wrong with which one."""
    text = setting.strip()
    if text and not text.startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise _invalid(f"{setting[:200]!r} cannot be read: {error}") from None
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"it is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise _invalid("it is not an object of models by name")
    found = {name: _model_of(name, value) for name, value in given.items()}
    for each in found.values():
        for member in each.members:
            if member.model in found:
                raise _invalid(f"{each.name!r} names the virtual model {member.model!r}")
    return found


def _model_of(name: str, given: Any) -> VirtualModel:
    if not _is_name(name):
        raise _invalid(f"{name[:40]!r} is not a name of up to {_LONGEST_NAME} characters")
    if isinstance(given, str):
        given = {"models": [given]}
    if isinstance(given, list):
        given = {"models": given}
    if not isinstance(given, dict):
        raise _invalid(f"{name!r} is neither a model, a list of models nor an object")
    _check_fields(given, ("models", "choose"), name)
    mode, listed = given.get("choose", ORDERED), given.get("models")
    if mode not in _MODES:
        raise _invalid(f"choose of {name!r} is {mode!r}; known: {', '.join(_MODES)}")
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_MODELS:
        raise _invalid(f"models of {name!r} is not a list of 1 to {_MOST_MODELS} models")
    return VirtualModel(name, tuple(_member_of(each, name) for each in listed), mode)


def _member_of(given: Any, name: str) -> Member:
    if isinstance(given, str):
        given = {"model": given}
    if not isinstance(given, dict):
        raise _invalid(f"a model of {name!r} is neither a name nor an object")
    _check_fields(given, ("model", "weight", "when"), name)
    model, weight = given.get("model"), given.get("weight", 1)
    if not _is_name(model):
        raise _invalid(f"a model of {name!r} is {model!r}, which is not a name")
    if type(weight) is not int or not 0 < weight <= _MOST_WEIGHT:
        raise _invalid(f"weight of {model!r} in {name!r} is {weight!r}, not 1 to {_MOST_WEIGHT}")
    return Member(
        str(model), weight, _condition_of(given.get("when", {}), f"{model!r} in {name!r}")
    )


def _condition_of(given: Any, where: str) -> Condition:
    if not isinstance(given, dict):
        raise _invalid(f"when of {where} is not an object")
    known = ("tenants", "labels", "tokens_from", "tokens_below", "tools", "images")
    _check_fields(given, known, where)
    for field in ("tools", "images"):
        if type(given.get(field, True)) is not bool:
            raise _invalid(f"{field} of {where} is {given[field]!r}, not true or false")
    for field in ("tokens_from", "tokens_below"):
        if type(given.get(field, 1)) is not int or given.get(field, 1) < 0:
            raise _invalid(f"{field} of {where} is {given[field]!r}, not a whole number from 0")
    for field in ("tenants", "labels"):
        listed = given.get(field, [])
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise _invalid(f"{field} of {where} is not a list of texts")
    try:
        labels = frozenset(check_label(each, "labels") for each in given.get("labels", []))
    except BadRequest as error:
        raise _invalid(f"labels of {where}: {error.message}") from None
    return Condition(
        frozenset(given.get("tenants", [])),
        labels,
        given.get("tokens_from", 0),
        given.get("tokens_below"),
        given.get("tools"),
        given.get("images"),
    )


def _check_fields(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise _invalid(
                f"{where} has the unknown field {name[:40]!r}; known: {', '.join(known)}"
            )


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and 0 < len(given) <= _LONGEST_NAME and given == given.strip()


def _invalid(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_VIRTUAL_MODELS is invalid: {problem}.",
        next_step='Write it like {"fast": "small", "smart": ["large", "other"]}; see docs/operator.md.',
    )
