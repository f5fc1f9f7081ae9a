"""Checks of a JSON schema before it is compiled: its size, its references, and that it has an end."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from engine.decoding.grammar.closing import Closing
from engine.decoding.grammar.one_of import Apartness, properties_of, required_of
from engine.decoding.grammar.references import target_of
from engine.errors import RequestError

# At most one blank between the parts of JSON: a weak model would write blanks for ever.
JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}
_MAX_NODES = 20_000  # schemas within the schema
_MAX_NAMES = 1_500  # properties of one object: compiling takes the square of the optional ones
_MAX_DEPTH = 100
_MAX_REPEATS = 100_000  # minItems, maxLength and their like
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4",
    "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer",
    "relative-json-pointer", "regex",
}  # fmt: skip
_LARGEST_INTEGER = (1 << 53) - 1
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_SCALARS = {"string", "number", "integer", "boolean", "null"}
_ONE = (
    "items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames",
    "unevaluatedProperties", "if", "then", "else",
)  # fmt: skip
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Where one is used, which additional properties an object may have may follow from another schema.
_COMBINING = {
    "allOf", "not", "if", "dependentSchemas", "dependentRequired", "patternProperties",
    "unevaluatedProperties", "propertyNames", "minProperties", "$dynamicRef",
}  # fmt: skip
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def checked_schema(text: str) -> str:
    """The schema, with bounds for integers that have none and objects closed. Raises RequestError for
    one that is too large, loops or is never satisfied by a finite value."""
    try:
        root = json.loads(text)
    except ValueError as error:
        raise _refused(f"it is not JSON: {error}") from error
    except RecursionError:
        raise _refused(f"it is nested more than {_MAX_DEPTH} deep") from None
    if not isinstance(root, dict | bool):
        raise _refused("it must be an object")
    found = _Schemas(root)
    found.visit(root)
    if not found.finite():
        raise _refused("no finite value satisfies it: a required property or a $ref leads back")
    combined = any(_COMBINING & node.keys() for node in found.nodes)
    closing = None if combined else Closing(found.nodes, found.targets)
    closed = closing.in_place() if closing else []
    apartness = Apartness(found.targets, {id(node) for node in closed})
    for node in found.nodes:
        _bound_integers(node)
        _forget_note(node)
        if "anyOf" not in node and apartness.is_any_of(_list(node, "oneOf")):
            node["anyOf"] = node.pop("oneOf")
    for node in closed:
        node["additionalProperties"] = False
    if closing is not None:
        closing.close_composed()
    return json.dumps(root)


@dataclass(slots=True)
class _Schemas:
    """All schemas within one, each before those that it contains or refers to."""

    root: Any
    nodes: list[dict[str, Any]] = field(default_factory=list)
    targets: dict[str, Any] = field(default_factory=dict)  # by $ref
    seen: set[int] = field(default_factory=set)  # ids of nodes, which live as long as the root
    together: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of objects, by id

    def visit(self, root: Any) -> None:
        waiting = [(root, 0)]
        while waiting:
            node, depth = waiting.pop()
            if not isinstance(node, dict) or id(node) in self.seen:
                continue
            if depth > _MAX_DEPTH or len(self.nodes) >= _MAX_NODES:
                raise _refused(
                    f"it has more than {_MAX_NODES} schemas, or they are nested more than "
                    f"{_MAX_DEPTH} deep"
                )
            self.seen.add(id(node))
            self.nodes.append(node)
            _simplify(node)
            _check_numbers(node)
            waiting += [(child, depth + 1) for child in _children(node)]
            if isinstance(node.get("$ref"), str):
                waiting.append((self._target(node["$ref"]), depth))

    def finite(self) -> bool:
        """Whether a finite value satisfies the root: the least fixed point over all schemas."""
        known: set[int] = set()
        for _ in range(_MAX_DEPTH):
            before = len(known)
            for node in reversed(self.nodes):
                if id(node) not in known and self._is_finite(node, known):
                    known.add(id(node))
            if len(known) == before:
                break
        return self._known(self.root, known)

    def _is_finite(self, node: dict[str, Any], known: set[int]) -> bool:
        if "const" in node or "enum" in node:
            return True
        if isinstance(node.get("$ref"), str) and not self._known(self.targets[node["$ref"]], known):
            return False
        if not all(self._known(each, known) for each in _list(node, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            options = _list(node, name)
            if options and not any(self._known(each, known) for each in options):
                return False
        types = node.get("type")
        types = {types} if isinstance(types, str) else set(types or _SCALARS)
        return (
            bool(types & _SCALARS)
            or ("object" in types and self._finite_object(node, known))
            or ("array" in types and self._finite_array(node, known))
        )

    def _finite_object(self, node: dict[str, Any], known: set[int]) -> bool:
        parts = self.together.get(id(node))
        if parts is None:
            parts = self.together[id(node)] = self._together(node)
        needed = {name for part in parts for name in required_of(part)}
        if any(not self._known(_property(part, name), known) for part in parts for name in needed):
            return False
        least = max(
            (n for part in parts if isinstance(n := part.get("minProperties"), int)), default=0
        )
        if least <= len(needed) or any(_dict(part, "patternProperties") for part in parts):
            return True
        others = [part.get("additionalProperties", True) for part in parts]
        named = {name for part in parts for name in properties_of(part)} - needed
        return all(self._known(each, known) for each in others) or any(
            all(self._known(_property(part, name), known) for part in parts) for name in named
        )

    def _together(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        """The schemas that hold together with it: by allOf and $ref, at most `_MAX_DEPTH`."""
        parts: dict[int, dict[str, Any]] = {}
        waiting: list[Any] = [node]
        while waiting and len(parts) < _MAX_DEPTH:
            each = waiting.pop()
            if isinstance(each, dict) and id(each) not in parts:
                parts[id(each)] = each
                waiting += _list(each, "allOf")
                waiting.append(self.targets.get(str(each.get("$ref"))))
        return list(parts.values())

    def _finite_array(self, node: dict[str, Any], known: set[int]) -> bool:
        least = node.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return True
        first = _list(node, "prefixItems")[:least]
        rest = [node.get("items", True)] if len(first) < least else []
        return all(self._known(each, known) for each in [*first, *rest])

    def _known(self, node: Any, known: set[int]) -> bool:
        return id(node) in known if isinstance(node, dict) else node is not False

    def _target(self, ref: str) -> Any:
        if ref in self.targets:
            return self.targets[ref]
        if not ref.startswith("#"):
            raise _refused(f"$ref {ref[:100]!r} is not within the schema")
        node = target_of(self.root, ref)
        if node is None:
            raise _refused(f"$ref {ref[:100]!r} names nothing in the schema")
        self.targets[ref] = node
        return node


def _children(node: dict[str, Any]) -> list[Any]:
    children = [node[name] for name in _ONE if isinstance(node.get(name), dict)]
    for name in _MANY:
        children += _list(node, name)
    children += [] if isinstance(node.get("items"), dict) else _list(node, "items")
    for name in _NAMED:
        named = node.get(name)
        if isinstance(named, dict):
            if len(named) > _MAX_NAMES and name == "properties":
                raise _refused(f"an object has {len(named)} properties, at most {_MAX_NAMES}")
            children += list(named.values())
    return children


def _simplify(node: dict[str, Any]) -> None:
    """Takes out keywords that say nothing here, and writes counts as whole numbers."""
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    if "additionalProperties" in node:  # which evaluates all that is left
        node.pop("unevaluatedProperties", None)
    for name in _COUNTS:
        count = node.get(name)
        if isinstance(count, float) and count.is_integer():
            node[name] = int(count)
    types = node.get("type", [])
    for each in types if isinstance(types, list) else [types]:
        if each not in _TYPES:
            raise _refused(f"type is {json.dumps(each)[:100]}: use one of {', '.join(_TYPES)}")


def _check_numbers(node: dict[str, Any]) -> None:
    for name in _COUNTS:
        count = node.get(name)
        if isinstance(count, int) and count > _MAX_REPEATS:
            raise _refused(f"{name} is {count}, at most {_MAX_REPEATS}")


def _bound_integers(node: dict[str, Any]) -> None:
    """Integers of any length are within the range that JSON readers agree on (RFC 8259, section 6): a
    weak model would write digits for ever."""
    types = node.get("type")
    types = [types] if isinstance(types, str) else types or []
    if "integer" not in types or "number" in types or {"enum", "const"} & node.keys():
        return
    lowest = [node[name] for name in ("minimum", "exclusiveMinimum") if name in node]
    highest = [node[name] for name in ("maximum", "exclusiveMaximum") if name in node]
    numbers = [each for each in lowest + highest if isinstance(each, int | float)]
    if not lowest:
        node["minimum"] = min(
            [-_LARGEST_INTEGER, *[_ten_times(each) for each in numbers if each < 0]]
        )
    if not highest:
        node["maximum"] = max(
            [_LARGEST_INTEGER, *[_ten_times(each) for each in numbers if each > 0]]
        )


def _ten_times(bound: float) -> int:
    """Far enough beyond a bound that is itself beyond the usual range."""
    large = math.isfinite(bound) and abs(bound) >= _LARGEST_INTEGER
    return int(bound) * 10 if large else 0


def _forget_note(node: dict[str, Any]) -> None:
    """A `format` that the specification does not define is a note to people (JSON Schema Validation
    2020-12, section 7.2.3); pydantic and OpenAPI have many."""
    if isinstance(name := node.get("format"), str) and name not in _FORMATS:
        del node["format"]


def _property(node: dict[str, Any], name: str) -> Any:
    """The schema of an object's property. A pattern may match its name, which is not tried."""
    named = properties_of(node)
    if name in named:
        return named[name]
    patterns = _dict(node, "patternProperties")
    return True if patterns else node.get("additionalProperties", True)


def _dict(node: dict[str, Any], name: str) -> dict[str, Any]:
    value = node.get(name)
    return value if isinstance(value, dict) else {}


def _list(node: dict[str, Any], name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []


def _refused(why: str) -> RequestError:
    return RequestError("invalid_grammar", f"the json_schema cannot be served: {why}")
