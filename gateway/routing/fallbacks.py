"""Fallback models for when no replica of a model can answer. The operator sets chains; a tenant may
override them or turn them off (`fallback` in its settings: "off", or {"model": ["next", …]}).

The usage event names the model that answered, and its price applies.
"""

import json
from collections.abc import Mapping
from typing import Any

from core.errors import SettingError, TollhouseError
from core.tenants.keys import Principal
from gateway.catalog.catalog import Catalog, Target

HEADER = "x-tollhouse-fallback"
OFF = "off"


class TryFallback(Exception):
    """No replica of the model produced output, and another model may answer."""

    def __init__(self, error: TollhouseError) -> None:
        super().__init__(error.message)
        self.error = error


class Fallbacks:
    def __init__(self, catalog: Catalog, chains: Mapping[str, tuple[str, ...]]) -> None:
        self._catalog = catalog
        self._chains = chains

    def after(self, principal: Principal, target: Target) -> list[Target]:
        """The fallbacks that this key may use, in order. Adapters have none, since they need their
        base model."""
        override = principal.settings.get("fallback") if principal.settings else None
        if target.adapter is not None or override == OFF or not (self._chains or override):
            return []
        chains: Mapping[str, Any] = override if isinstance(override, dict) else self._chains
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
    """Parse `small=large,other; large=other`, or a JSON object of lists."""
    text = setting.strip()
    if text.startswith("{"):
        try:
            given = json.loads(text)
            return {str(name): tuple(map(str, after)) for name, after in given.items()}
        except (ValueError, TypeError) as error:
            raise _invalid(f"it is not a JSON object of lists: {error}") from None
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, equals, after = part.partition("=")
        names = tuple(filter(None, (each.strip() for each in after.split(","))))
        if not equals or not name.strip() or not names:
            raise _invalid(f"{part!r} is not model=next,next")
        found[name.strip()] = names
    return found


def _invalid(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_FALLBACKS is invalid: {problem}.",
        next_step="Write it like small=large,other; large=other.",
    )
