"""Price lists of others, read into prices of ours: nothing is stored here.

Three forms are known by their content. LiteLLM's `model_prices_and_context_window.json` is an object of
models with dollars a token (`input_cost_per_token`). OpenRouter's answer of `/api/v1/models` is `data`, a
list of models with `pricing` in dollars a token as texts. Our own is `prices`, a list as in a file of
`tollhouse apply`: `model`, `rates`, and `currency`, `region` and `mark_up` where they differ.

Prices that hold for some requests alone become prices of their own: `<model>@priority`, `<model>@flex`,
`<model>@batch`, and `<model>@above-200000` for prompts of more tokens. What a list has and we have no
component for is named in `left_out`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from billing.pricing.pricing import PER_MILLION, Component
from core.errors import BadRequest
from core.money import decimal_of

MOST_BYTES = 64 << 20
_MILLION = 10**6
_LITELLM = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cached_input",
    "cache_creation_input_token_cost": "cache_write_5m",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
    "output_cost_per_reasoning_token": "reasoning",
    "input_cost_per_audio_token": "audio_input",
    "output_cost_per_audio_token": "audio_output",
    "input_cost_per_image_token": "image_input",
    "output_cost_per_image_token": "image_output",
    "input_cost_per_second": "audio_second",
    "output_cost_per_image": "image",
    "input_cost_per_character": "character",
}
_SEARCH = "search_context_cost_per_query"
_SEARCH_SIZE = "search_context_size_medium"  # OpenAI's and Anthropic's usual one
_OPENROUTER = {
    "prompt": "input",
    "completion": "output",
    "request": "request",
    "input_cache_read": "cached_input",
    "input_cache_write": "cache_write_5m",
    "internal_reasoning": "reasoning",
    "audio": "audio_input",
    "web_search": "search",
}
# Of our own form, besides `rates`.
_OWN = {"model", "rates", "currency", "region", "mark_up", "adapter", "note"}
_ABOVE = re.compile(r"_above_(\d+)k_tokens$")
_TIERS = {"_priority": "@priority", "_flex": "@flex", "_batches": "@batch"}


@dataclass(frozen=True, slots=True)
class Listed:
    """A price of a list: rates in the written form, in `currency` per million or per unit."""

    model: str
    rates: Mapping[str, Any]
    currency: str = "USD"
    region: str = ""
    mark_up: Fraction | None = None  # of this row, in place of the one for all
    left_out: tuple[str, ...] = field(default=())  # fields that are no component of ours


def parse(text: str) -> list[Listed]:
    """The prices of a list, by model. BadRequest says which model has what that cannot be read."""
    if len(text) > MOST_BYTES:
        raise _refused(f"the list has more than {MOST_BYTES >> 20} MiB", "give a smaller one")
    try:
        # Texts in place of floats: a price is never rounded by the way it is written.
        given = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError) as error:
        raise _refused(f"it is not JSON: {error}", "give a price list as JSON") from None
    if isinstance(given, dict) and isinstance(given.get("prices"), list):
        found = [_own(each) for each in given["prices"]]
    elif isinstance(given, dict) and isinstance(given.get("data"), list):
        found = [one for each in given["data"] for one in _openrouter(each)]
    elif isinstance(given, dict) and any(
        isinstance(each, dict) and set(_LITELLM) & set(each) for each in given.values()
    ):
        found = [
            one
            for name, each in given.items()
            if name != "sample_spec" and isinstance(each, dict)
            for one in _litellm(name, each)
        ]
    else:
        raise _refused(
            "its format is not recognized",
            "give LiteLLM's model_prices_and_context_window.json, OpenRouter's models, or an object"
            ' with "prices"',
        )
    seen: set[tuple[str, str, str]] = set()
    for price in found:
        key = (price.model, price.currency, price.region)
        if key in seen:
            raise _refused(f"{price.model} is in it twice", "keep one of the two")
        seen.add(key)
    return found


def named_models(given: Iterable[str]) -> dict[str, str]:
    """`NAME` or `NAME=PUBLIC` of a list's models, as the public name of each; "" keeps the list's."""
    pairs = (each.partition("=") for each in given)
    return {name.strip(): public.strip() for name, _, public in pairs}


def wanted(
    text: str, models: Mapping[str, str], *, every: bool = False, region: str = ""
) -> list[Listed]:
    """The prices of a list that are meant: of the models named, or of every one."""
    if bool(models) == every:
        raise BadRequest(
            "It is not said which models of the list are meant.",
            next_step="Name models of the list, or ask for all of them.",
            param="model",
        )
    given = parse(text)
    missing = sorted(models.keys() - {each.model for each in given})
    if missing:
        raise BadRequest(
            f"The list has no model {missing[0]!r}.",
            next_step="Give a name as the list spells it.",
            param="model",
        )
    return chosen(given, models=models, region=region)


def chosen(listed: Iterable[Listed], *, models: Mapping[str, str], region: str) -> list[Listed]:
    """Those of the named models (pattern or name in the list -> public name; "" keeps it), in a region
    where it has one, else without. Empty `models` are all."""
    found: dict[tuple[str, str], Listed] = {}
    for each in listed:
        if each.region not in ("", region):
            continue
        base, at, tier = each.model.partition("@")
        if models and base not in models:
            continue
        name = (models.get(base) or base) + at + tier
        known = found.get((name, each.currency))
        if known is None or each.region:
            found[(name, each.currency)] = replace(each, model=name)
    return list(found.values())


def marked_up(listed: Listed, percent: Fraction) -> dict[str, Any]:
    """The written rates with the row's mark-up, else this one. A result with more than twelve decimals
    of a unit is rounded up: a mark-up never becomes less by rounding."""
    factor = 1 + (listed.mark_up if listed.mark_up is not None else percent) / 100
    return {name: _times(name, rate, factor) for name, rate in listed.rates.items()}


def percent_of(text: str) -> Fraction:
    """Of `20`, `20%` or `-2.5%`. BadRequest for what is no percentage above -100."""
    try:
        found = Fraction(Decimal(text.strip().removesuffix("%")))
    except (InvalidOperation, ValueError, OverflowError):
        found = Fraction(-100)
    if not -100 < found <= 100_000:
        raise BadRequest(
            f"The mark-up is {text[:40]!r}.",
            next_step="Give a percentage above -100, such as 20% or -5%.",
            param="markup",
        )
    return found


def _times(name: str, rate: Any, factor: Fraction) -> Any:
    if isinstance(rate, dict):
        return {
            key: _times(name, value, factor)
            if key in ("price", "flat")
            else [_times(name, tier, factor) for tier in value]
            if key == "tiers"
            else value
            for key, value in rate.items()
        }
    return _text(Fraction(Decimal(str(rate))) * factor, name)


def _text(amount: Fraction, name: str) -> str:
    """A decimal of the written form, in whole picounits of one unit, rounded up."""
    per = _MILLION if name in PER_MILLION else 1
    units = amount * 10**12 / per
    whole = -(-units.numerator // units.denominator)
    return decimal_of(whole * per)


def _own(given: Any) -> Listed:
    if not isinstance(given, dict) or not isinstance(given.get("model"), str):
        raise _refused("a price has no model", 'give each a "model" and "rates"')
    name, rates = given["model"], given.get("rates")
    unknown = sorted(set(given) - _OWN)
    if unknown:
        raise _refused(f"{name} has {', '.join(unknown)}", f"use {', '.join(sorted(_OWN))}")
    if not isinstance(rates, dict) or not rates:
        raise _refused(f"{name} has no rates", 'give "rates" as in `tollhouse apply`')
    mark_up = percent_of(str(given["mark_up"])) if given.get("mark_up") is not None else None
    return Listed(
        name,
        {each: _plain(rate) for each, rate in rates.items()},
        str(given.get("currency", "USD")),
        str(given.get("region", "")),
        mark_up,
    )


def _plain(rate: Any) -> Any:
    """Decimals as texts; counts such as `up_to` as integers."""
    if isinstance(rate, dict):
        return {
            key: int(value)
            if key in ("up_to", "size", "free") and isinstance(value, Decimal)
            else [_plain(each) for each in value]
            if isinstance(value, list)
            else _plain(value)
            for key, value in rate.items()
        }
    return str(rate) if isinstance(rate, Decimal) else rate


def _litellm(name: str, given: dict[str, Any]) -> list[Listed]:
    found: dict[str, dict[str, str]] = {}
    left_out = []
    for key, value in given.items():
        if key == _SEARCH:
            if isinstance(value, dict) and _SEARCH_SIZE in value:
                _put(found, "", "search", value[_SEARCH_SIZE], name)
            continue
        if "cost" not in key or value is None:
            continue
        if not isinstance(value, Decimal):
            left_out.append(key)
            continue
        base, suffix = key, ""
        if (above := _ABOVE.search(key)) is not None:
            base, suffix = key[: above.start()], f"@above-{int(above[1]) * 1000}"
        else:
            for end, tier in _TIERS.items():
                if key.endswith(end):
                    base, suffix = key.removesuffix(end), tier
        component = _LITELLM.get(base)
        if component is None:
            left_out.append(key)
        else:
            _put(found, suffix, component, value, name)
    return _with_tiers(name, found, left_out)


def _openrouter(given: Any) -> list[Listed]:
    if not isinstance(given, dict) or not isinstance(given.get("id"), str):
        raise _refused("a model has no id", "give OpenRouter's answer as it is")
    name, pricing = given["id"], given.get("pricing")
    if not isinstance(pricing, dict):
        return []
    found: dict[str, dict[str, str]] = {}
    left_out = []
    for key, value in pricing.items():
        if key in _OPENROUTER:
            _put(found, "", _OPENROUTER[key], value, name)
        elif str(value) not in ("0", "None"):
            left_out.append(key)
    return _with_tiers(name, found, left_out)


def _put(
    found: dict[str, dict[str, str]], suffix: str, component: str, value: Any, name: str
) -> None:
    """A price in dollars of one unit. OpenRouter's -1 is a price that depends on what answers."""
    try:
        amount = Fraction(Decimal(value))
    except (InvalidOperation, TypeError, ValueError, OverflowError):
        amount = Fraction(-1)
    if amount < 0:
        if str(value) == "-1":
            return
        raise _refused(f"{name}: the price of {component} is {str(value)[:40]!r}", "correct it")
    per = _MILLION if component in PER_MILLION else 1
    if amount or component in (Component.INPUT, Component.OUTPUT):
        found.setdefault(suffix, {})[component] = _text(amount * per, component)


def _with_tiers(name: str, found: dict[str, dict[str, str]], left_out: list[str]) -> list[Listed]:
    """What a tier or a long prompt does not change costs what it costs else."""
    plain = found.pop("", {})
    if not plain:
        return []
    return [
        Listed(name, plain, left_out=tuple(sorted(left_out))),
        *(Listed(name + suffix, plain | rates) for suffix, rates in sorted(found.items())),
    ]


def _refused(problem: str, next_step: str) -> BadRequest:
    return BadRequest(
        f"The price list cannot be used: {problem}.",
        next_step=f"{next_step[0].upper()}{next_step[1:]}.",
        code="price_list_refused",
    )
