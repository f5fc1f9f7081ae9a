"""Closes objects that name their properties: a weak model would write others for ever.

A schema that stands alone is closed in place. Where several hold together (`$ref` or `anyOf` with
properties of the same level, as inheritance and unions are written), each knows only some of the
names, so the schema at the top gets one more that lists all of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from engine.decoding.grammar.one_of import properties_of, required_of

_OPTIONS = ("anyOf", "oneOf")
_OF_OBJECTS = {"properties", "required", "additionalProperties", "unevaluatedProperties"}
_MOST_PARTS = 100
Schema = dict[str, Any]


class Closing:
    """Of all schemas within one. `targets`: by $ref."""

    def __init__(self, nodes: Iterable[Schema], targets: Mapping[str, Any]) -> None:
        self._targets = targets
        self._nodes = list(nodes)
        self._composed = [node for node in self._nodes if self._is_composed(node)]
        self._together: set[int] = set()  # ids of schemas that another completes
        for node in self._composed:
            for part in self._parts(node)[1:]:
                self._together.add(id(part))
            for option in self._options(node):
                self._together |= {id(part) for part in self._parts(option)}

    def in_place(self) -> list[Schema]:
        """Schemas that name all properties of their objects."""
        return [
            node
            for node in self._nodes
            if id(node) not in self._together
            and not self._is_composed(node)
            and "additionalProperties" not in node
            and _names_all(node, properties_of(node))
        ]

    def close_composed(self) -> None:
        for node in self._nodes:
            alias = self._alias(node)
            if id(node) in self._together:
                continue
            if self._is_composed(node) or (alias is not None and id(alias) in self._together):
                fence = self._fence(node)
                if fence is not None:
                    node.setdefault("allOf", []).append(fence)

    def _alias(self, node: Schema) -> Any:
        return self._targets.get(str(node.get("$ref"))) if "$ref" in node else None

    def _is_composed(self, node: Schema) -> bool:
        named = "$ref" in node or any(isinstance(node.get(name), list) for name in _OPTIONS)
        return named and bool(_OF_OBJECTS & node.keys())

    def _parts(self, node: Schema) -> list[Schema]:
        """The schema and those behind its $ref and theirs, which all hold."""
        parts = [node]
        while len(parts) < _MOST_PARTS:
            behind = self._alias(parts[-1])
            if not isinstance(behind, dict) or any(behind is each for each in parts):
                break
            parts.append(behind)
        return parts

    def _options(self, node: Schema) -> list[Schema]:
        return [
            option
            for part in self._parts(node)
            for name in _OPTIONS
            if isinstance(part.get(name), list)
            for option in part[name]
            if isinstance(option, dict)
        ]

    def _fence(self, node: Schema, depth: int = 0) -> Schema | None:
        """A schema that allows the names alone that some part has; None where they are not known. What
        an option alone names has its schema there in every other option, too."""
        parts, options = self._parts(node), self._options(node)
        names: Schema = {name: True for part in parts for name in properties_of(part)}
        others: dict[str, list[Any]] = {}
        for option in options:
            within = self._fence(option, depth + 1) if depth < _MOST_PARTS else None
            if within is None and self._says_names(option):
                return None
            for name in within["properties"] if within else ():
                others.setdefault(name, []).extend(self._schemas_of(option, name))
        names |= {
            name: {"anyOf": schemas} if schemas else True
            for name, schemas in others.items()
            if name not in names
        }
        if any("additionalProperties" in part for part in parts):
            return None
        if any(not _names_all(part, names) for part in parts if properties_of(part)) or not names:
            return None
        return {"properties": names, "additionalProperties": False}

    def _says_names(self, option: Schema) -> bool:
        """Whether objects that match it may have properties of their own."""
        types = option.get("type", "object")
        return "object" in types if isinstance(types, str | list) else True

    def _schemas_of(self, option: Schema, name: str) -> list[Any]:
        return [
            properties_of(part)[name] for part in self._parts(option) if name in properties_of(part)
        ]


def _names_all(node: Schema, names: Mapping[str, Any]) -> bool:
    return bool(names) and required_of(node) <= names.keys()
