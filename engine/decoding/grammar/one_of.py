"""`oneOf` as `anyOf` where no value can match two of its schemas: the library serves the former only
where it sees that for itself, and it does not look behind `$ref`, as unions by a discriminator have it.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

_MOST_SCHEMAS = 100  # of one oneOf: each is compared with each
_DEPTH = 6  # properties within properties that are compared
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_OBJECT = {"object"}
Schema = Mapping[str, Any]


class Apartness:
    """Which schemas have no value in common. `targets`: by $ref. `closed`: ids of the objects whose
    answers have no property but those that the schema names, though it would allow more."""

    def __init__(self, targets: Mapping[str, Any], closed: Collection[int]) -> None:
        self._targets = targets
        self._closed = closed

    def is_any_of(self, schemas: list[Any]) -> bool:
        """Whether an answer that is made by one of them matches none of the others as written."""
        if not 0 < len(schemas) <= _MOST_SCHEMAS:
            return False
        return all(
            self._apart(made, other, _DEPTH)
            for place, made in enumerate(schemas)
            for other in (*schemas[:place], *schemas[place + 1 :])
        )

    def _apart(self, made: Any, other: Any, depth: int) -> bool:
        if made is False or other is False:
            return True
        if depth == 0 or not isinstance(made, dict) or not isinstance(other, dict):
            return False
        return any(
            self._parts_apart(one, two, depth)
            for one in self._parts(made)
            for two in self._parts(other)
        )

    def _parts(self, schema: Schema) -> list[Schema]:
        """Schemas that all hold: itself, and those behind its $ref and theirs, at most `_DEPTH`."""
        parts = [schema]
        while len(parts) < _DEPTH:
            behind = self._targets.get(str(parts[-1].get("$ref")))
            if not isinstance(behind, dict) or any(behind is each for each in parts):
                break
            parts.append(behind)
        return parts

    def _parts_apart(self, made: Schema, other: Schema, depth: int) -> bool:
        values, others = _values(made), _values(other)
        if values is not None and others is not None and not values & others:
            return True
        shared = _types(made) & _types(other)
        if not shared:
            return True
        return shared == _OBJECT and self._objects_apart(made, other, depth)

    def _objects_apart(self, made: Schema, other: Schema, depth: int) -> bool:
        needed, needed_too = required_of(made), required_of(other)
        if any(_forbids(made, name, id(made) in self._closed) for name in needed_too):
            return True
        if any(_forbids(other, name, False) for name in needed):
            return True
        here, there = properties_of(made), properties_of(other)
        return any(
            name in here and name in there and self._apart(here[name], there[name], depth - 1)
            for name in needed | needed_too
        )


def _values(schema: Schema) -> set[str] | None:
    """The only values it allows, each in one spelling."""
    if "const" in schema:
        return {_spelled(schema["const"])}
    listed = schema.get("enum")
    return {_spelled(each) for each in listed} if isinstance(listed, list) else None


def _spelled(value: Any) -> str:
    """1 and 1.0 are one number to JSON Schema, and true is none."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return (
        {name: _whole(each) for name, each in value.items()} if isinstance(value, dict) else value
    )


def _types(schema: Schema) -> frozenset[str] | set[str]:
    if (values := _values(schema)) is not None:
        return {_type_of(json.loads(each)) for each in values}
    listed = schema.get("type", list(_TYPES))
    listed = [listed] if isinstance(listed, str) else listed
    types = {each for each in listed if isinstance(each, str)}
    return types | {"integer"} if "number" in types else types


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def required_of(schema: Schema) -> set[str]:
    listed = schema.get("required")
    return {each for each in listed if isinstance(each, str)} if isinstance(listed, list) else set()


def properties_of(schema: Schema) -> Mapping[str, Any]:
    named = schema.get("properties")
    return named if isinstance(named, dict) else {}


def _forbids(schema: Schema, name: str, closed: bool) -> bool:
    if name in properties_of(schema) or schema.get("patternProperties"):
        return False
    return closed or schema.get("additionalProperties") is False
