"""A tenant's rule for its cache of complete answers, kept in its settings."""

from typing import Any

import msgspec
from msgspec import Struct

from core.errors import BadRequest

SETTING = "response_cache"
ERASED = "response_cache_erased"  # the time of the last erasure; answers of before are not served
MAX_TTL_S = 86_400


class CacheRule(Struct, frozen=True, forbid_unknown_fields=True):
    """`sampled` and `tools`: also answers of a temperature above 0, or to requests with tools."""

    ttl_s: int = 3_600
    sampled: bool = False
    tools: bool = False


def check(settings: dict[str, Any]) -> None:
    """BadRequest if the settings hold a rule that is not one."""
    written = settings.get(SETTING)
    if written is not None and _parse(written) is None:
        raise BadRequest(
            f"{SETTING} must be an object of ttl_s (1 to {MAX_TTL_S}), sampled and tools.",
            next_step='Write {"ttl_s": 3600}, or null to turn the cache off.',
            param=f"settings.{SETTING}",
            code="invalid_value",
        )


def rule_of(settings: dict[str, Any]) -> CacheRule | None:
    """None without a rule: nothing is cached unless a request asks for it."""
    return _parse(settings[SETTING]) if SETTING in settings else None


def _parse(written: Any) -> CacheRule | None:
    try:
        rule = msgspec.convert(written, CacheRule)
    except msgspec.ValidationError:
        return None
    return rule if 1 <= rule.ttl_s <= MAX_TTL_S else None
