"""What a key may use: models, adapters and routes. A list that could never allow anything is refused."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import BadRequest

NAMES = ("models", "adapters", "routes")
_SHOWN = 8  # names that an error lists


@dataclass(frozen=True, slots=True)
class KeyScopes:
    """What a key may use. None: everything that its tenant may use."""

    models: frozenset[str] | None = None
    adapters: frozenset[str] | None = None
    routes: frozenset[str] | None = None  # "/v1/chat/completions", or a prefix such as "/v1/*"

    def allows_route(self, route: str) -> bool:
        return self.routes is None or any(covers(allowed, route) for allowed in self.routes)

    def as_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in NAMES}
        return {name: sorted(value) for name, value in named.items() if value is not None}


def covers(allowed: str, route: str) -> bool:
    """Whether a route, or a prefix that ends in `*`, is inside what `allowed` names."""
    return route.startswith(allowed[:-1]) if allowed.endswith("*") else route == allowed


def check(scopes: Mapping[str, Iterable[str] | None]) -> None:
    """BadRequest for an entry that has no meaning: an empty one, or `*` where it is no prefix."""
    for name, values in scopes.items():
        for value in values or ():
            path = name == "routes"
            stars = value.count("*") - (path and value.endswith("*"))
            if not value.strip() or stars or (path and not value.startswith("/")):
                raise BadRequest(
                    f"scopes.{name} has {value[:80]!r}, which names nothing.",
                    next_step='Write routes such as "/v1/*", or leave routes out to allow all.'
                    if path
                    else f"Name {name} in full, or leave {name} out to allow all.",
                    param=f"scopes.{name}",
                    code="invalid_value",
                )


def check_known(param: str, names: Iterable[str], known: Collection[str]) -> None:
    """BadRequest for a name that nothing has: a key with it could use nothing."""
    for name in sorted(set(names) - set(known)):
        listed = ", ".join(sorted(known)[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        raise BadRequest(
            f"{param} has {name[:200]!r}, which does not exist.",
            next_step=f"Use names of: {listed or 'none exist yet'}.",
            param=param,
            code="invalid_value",
        )


def check_names(
    scopes: Mapping[str, Iterable[str] | None],
    routing: Mapping[str, Any],
    models: Collection[str],
    adapters: Collection[str],
) -> None:
    """BadRequest for a model or an adapter that does not exist, in scopes, chains or canaries."""
    check_known("scopes.models", scopes.get("models") or (), models)
    check_known("scopes.adapters", scopes.get("adapters") or (), adapters)
    every = {*models, *adapters, *(f"{base}:{name}" for base in models for name in adapters)}
    for name in ("fallback", "canary"):
        chosen = routing.get(name)
        if isinstance(chosen, dict):
            others = [each for after in chosen.values() for each in after]
            check_known(f"routing.{name}", [*chosen, *others], every)


def check_routes(names: Iterable[str], templates: Collection[str]) -> None:
    """BadRequest for a route that the gateway does not have. `templates` are paths such as
    `/v1/files/{file_id}`."""
    for name in sorted(names):
        if not any(_meets(name, template) for template in templates):
            raise BadRequest(
                f"scopes.routes has {name[:200]!r}, which no route matches.",
                next_step="Use a path of /openapi.json, or a prefix of one such as `/v1/*`.",
                param="scopes.routes",
                code="invalid_value",
            )


def _meets(name: str, template: str) -> bool:
    given, parts = name.removesuffix("*").split("/"), template.split("/")
    prefix = name.endswith("*")
    if len(given) > len(parts) or (not prefix and len(given) != len(parts)):
        return False
    *whole, last = zip(given, parts, strict=False)
    if not all(_equal(one, part) for one, part in whole):
        return False
    one, part = last
    return _equal(one, part) or (prefix and part.startswith((one, "{")))


def _equal(given: str, part: str) -> bool:
    return bool(given) if part.startswith("{") else given == part
