"""Which model answers when none of a model's replicas can: chains that the operator sets and that a
tenant may replace or turn off (`fallback` in its settings: "off", or {"model": ["next", …]}).

What really served is what the event names and what is charged, at its own price.
"""

import json
from collections.abc import Mapping
from typing import Any

from core.errors import SettingError, TollhouseError
from core.tenants.keys import Principal
from gateway.catalog.catalog import Catalog, Target

HEADER = "x-tollhouse-fallback"
OFF = "off"


class FallThrough(Exception):
    """No replica of this model gave a byte, and another model may answer."""

    def __init__(self, error: TollhouseError) -> None:
        super().__init__(error.message)
        self.error = error


class Fallbacks:
    def __init__(self, catalog: Catalog, chains: Mapping[str, tuple[str, ...]]) -> None:
        self._catalog = catalog
        self._chains = chains

    def after(self, principal: Principal, target: Target) -> list[Target]:
        """Those that may follow, in order: only what this key may use. An adapter has none, for no
        other base can stand in for it."""
        wanted = principal.settings.get("fallback") if principal.settings else None
        if target.adapter is not None or wanted == OFF or not (self._chains or wanted):
            return []
        chains: Mapping[str, Any] = wanted if isinstance(wanted, dict) else self._chains
        listed = chains.get(target.model.name) or ()
        found = []
        for name in listed if isinstance(listed, list | tuple) else ():
            try:
                after = self._catalog.resolve(principal, str(name))
            except TollhouseError:
                continue
            if after.adapter is None and after.model is not target.model:
                found.append(after)
        return found


def read_fallbacks(setting: str) -> dict[str, tuple[str, ...]]:
    """`small=large,other; large=other`, or a JSON object of lists."""
    text = setting.strip()
    if text.startswith("{"):
        try:
            given = json.loads(text)
            return {str(name): tuple(map(str, after)) for name, after in given.items()}
        except (ValueError, TypeError) as error:
            raise _wrong(f"it is not a JSON object of lists: {error}") from None
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, after = part.partition("=")
        names = tuple(filter(None, (each.strip() for each in after.split(","))))
        if not equals or not name.strip() or not names:
            raise _wrong(f"{part!r} is not model=next,next")
        found[name.strip()] = names
    return found


def _wrong(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_FALLBACKS is wrong: {problem}.",
        next_step="Write small=large,other; large=other.",
    )
