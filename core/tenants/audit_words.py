"""What an entry of the audit log changed: `limit 60 requests a minute → 3 requests a minute`."""

import json
from collections.abc import Mapping
from typing import Any

from core.tenants.models import AuditEntry
from core.tenants.plans import limit_in_words

_UNTOLD = ("id", "created_at", "last_used_at", "digest", "path")
_LIMIT = ("unit", "limit", "period_s")


def changes(entry: AuditEntry, names: Mapping[str, str] | None = None) -> list[str]:
    """One text for each field that differs, with names in place of the ids that are in `names`."""
    before, after = (_plain(values or {}) for values in (entry.before, entry.after))
    said = []
    for key in (key for key in before | after if key not in _UNTOLD):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        words = key.removesuffix("_id").replace("_", " ")
        first, second = _value(old, names or {}), _value(new, names or {})
        if entry.before is None:
            said += [f"{words} {second}"] if second != _NOTHING else []
        elif entry.after is None:
            said += [f"{words} {first}"] if first != _NOTHING else []
        else:
            said.append(f"{words} {first} → {second}")
    return said


_NOTHING = "nothing"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The fields, those of a limit as one in words."""
    if not all(
        isinstance(values.get(name), kind) for name, kind in zip(_LIMIT, _KINDS, strict=True)
    ):
        return values
    words = limit_in_words(*(values[name] for name in _LIMIT))
    return {name: each for name, each in values.items() if name not in _LIMIT} | {"limit": words}


_KINDS = (str, int, int)


def _value(value: Any, names: Mapping[str, str]) -> str:
    if value in (None, "", [], {}):
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ", ".join(names.get(each, each) for each in value)
    return json.dumps(value)
