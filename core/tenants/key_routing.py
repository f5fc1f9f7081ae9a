"""How the requests of a key, or of a whole tenant, choose their model: fallback chains and canaries.

A key's settings take the place of its tenant's, name by name.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import BadRequest

FALLBACK = "fallback"  # "off", or {"small": ["large", "other"]}
CANARY = "canary"  # {"small": {"large": 10}}: percent of its conversations, by model
OFF = "off"
_LONGEST_CHAIN = 8
_MOST_MODELS = 64
_LONGEST_NAME = 300


def check(settings: Mapping[str, Any], where: str) -> None:
    """BadRequest, with the path under `where`, for a chain or a share that is not one."""
    fallback, canary = settings.get(FALLBACK), settings.get(CANARY)
    if fallback is not None and fallback != OFF and not _are_chains(fallback):
        raise _wrong(
            f"{where}.{FALLBACK}",
            f'"off", or an object of lists of 1 to {_LONGEST_CHAIN} models',
            '{"small": ["large"]}',
        )
    if canary is not None and not _are_shares(canary):
        raise _wrong(
            f"{where}.{CANARY}",
            "an object of whole percents by model, at most 100 together for each",
            '{"small": {"large": 10}}',
        )


def parse_chains(text: str) -> Any:
    """`off`, or `small=large,other; large=other`; None if it is empty."""
    if text.strip() in ("", OFF):
        return text.strip() or None
    return {
        name: [each.strip() for each in after.split(",")] for name, after in _pairs(text, FALLBACK)
    }


def parse_shares(text: str) -> Any:
    """`small=large:10,other:5`; None if it is empty."""
    found: dict[str, dict[str, int]] = {}
    for name, after in _pairs(text, CANARY):
        for each in after.split(","):
            model, _, percent = each.strip().rpartition(":")
            if not (percent.isascii() and percent.isdecimal() and len(percent) < 4):
                raise _unreadable(CANARY, each)
            found.setdefault(name, {})[model] = int(percent)
    return found or None


def chains_text(settings: Mapping[str, Any]) -> str:
    """What `parse_chains` reads."""
    chains = settings.get(FALLBACK) or {}
    if chains == OFF:
        return OFF
    return "; ".join(f"{name}={','.join(after)}" for name, after in chains.items())


def shares_text(settings: Mapping[str, Any]) -> str:
    """What `parse_shares` reads."""
    shares = settings.get(CANARY) or {}
    return "; ".join(
        f"{name}=" + ",".join(f"{other}:{percent}" for other, percent in others.items())
        for name, others in shares.items()
    )


def written(settings: Mapping[str, Any]) -> str:
    """For a table: `small falls back to large; 10 % of small to large`."""
    chains, shares = settings.get(FALLBACK) or {}, settings.get(CANARY) or {}
    if chains == OFF:
        parts = ["no fallback"]
    else:
        parts = [f"{name} falls back to {', '.join(after)}" for name, after in chains.items()]
    parts += [
        f"{percent} % of {name} to {other}"
        for name, others in shares.items()
        for other, percent in others.items()
    ]
    return "; ".join(parts)


def _pairs(text: str, what: str) -> list[tuple[str, str]]:
    found = []
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, after = part.partition("=")
        if not (name.strip() and equals and after.strip()):
            raise _unreadable(what, part)
        found.append((name.strip(), after))
    return found


def _are_chains(given: Any) -> bool:
    return _is_map(given) and all(
        isinstance(after, list)
        and 1 <= len(after) <= _LONGEST_CHAIN
        and all(_is_name(each) for each in after)
        for after in given.values()
    )


def _are_shares(given: Any) -> bool:
    return _is_map(given) and all(
        _is_map(others)
        and all(type(percent) is int and 1 <= percent <= 100 for percent in others.values())
        and sum(others.values()) <= 100
        for others in given.values()
    )


def _is_map(given: Any) -> bool:
    return (
        isinstance(given, dict)
        and 1 <= len(given) <= _MOST_MODELS
        and all(_is_name(name) for name in given)
    )


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and 0 < len(given) <= _LONGEST_NAME


def _wrong(param: str, form: str, example: str) -> BadRequest:
    return BadRequest(
        f"{param} must be {form}.",
        next_step=f"Write it like {example}, or null to remove it.",
        param=param,
        code="invalid_value",
    )


def _unreadable(what: str, part: str) -> BadRequest:
    example = "small=large,other" if what == FALLBACK else "small=large:10"
    return BadRequest(
        f"{part[:80]!r} is not a {what} setting.",
        next_step=f"Write it like {example}; separate models by semicolons.",
        param=what,
        code="invalid_value",
    )
