"""JSON schemas with integers beyond 2**53, written as a Lark grammar: llguidance reads the numbers of a
schema as doubles, which would change them.

Only what leads to such a number is written here (constants, bounds, properties, items, unions and
references); every other schema within stays one, as `%json`.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.decoding.grammar.references import target_of
from engine.errors import RequestError

_LARGEST_EXACT = 1 << 53
_LARGEST_BOUND = 1 << 63
_MAY_BE_LARGE = re.compile(r"[0-9]{16}|[eE]\+?[0-9]{2}")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPES = {
    "integer": {*_BOUNDS},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_NOTES = {
    "$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "format", "discriminator",
}  # fmt: skip
_DEFINED = ("#/$defs/", "#/definitions/")
_BLANK = '" "?'
Schema = dict[str, Any]


def lark_of(text: str, options: Mapping[str, Any]) -> str | None:
    """The grammar of a checked schema with large integers; None for one without any. `options`: those
    of llguidance for the schemas that stay such. Raises RequestError."""
    if _MAY_BE_LARGE.search(text) is None:
        return None
    root = json.loads(text)
    writer = _Writer(root, options)
    if not isinstance(root, dict) or not writer.is_large(root):
        return None
    writer.rule(root, "start")
    return "\n".join(writer.rules)


class _Writer:
    def __init__(self, root: Any, options: Mapping[str, Any]) -> None:
        self.rules: list[str] = []
        self._root = root
        self._options = options
        self._names: dict[int, str] = {}
        self._large: dict[int, bool] = {}

    def is_large(self, schema: Any) -> bool:
        """Whether it, or any schema that it leads to, has a large integer."""
        if not isinstance(schema, dict):
            return False
        if id(schema) not in self._large:
            self._large[id(schema)] = False  # for references that lead back
            own = _has_large_bound(schema) or any(map(_is_large, _numbers(schema)))
            self._large[id(schema)] = own or any(map(self.is_large, self._inner(schema)))
        return self._large[id(schema)]

    def _inner(self, schema: Schema) -> Iterator[Any]:
        for value in (schema.get("properties"), schema.get("patternProperties")):
            yield from value.values() if isinstance(value, dict) else ()
        for name in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
            value = schema.get(name)
            yield from value if isinstance(value, list) else ()
        for name in ("items", "additionalProperties", "not", "contains", "if", "then", "else"):
            yield schema.get(name)
        if isinstance(schema.get("$ref"), str):
            yield self._target(schema["$ref"])

    def _target(self, ref: str) -> Any:
        target = target_of(self._root, ref)
        assert target is not None, "the schema was checked"
        return target

    def rule(self, schema: Any, name: str = "") -> str:
        """The name of the rule for a schema."""
        known = self._names.get(id(schema)) if isinstance(schema, dict) else None
        if known is not None:
            return known
        name = name or f"schema_{len(self.rules)}"
        if isinstance(schema, dict):
            self._names[id(schema)] = name
        self._add(name, lambda: self._expression(schema))
        return name

    def _add(self, name: str, expression: Any) -> None:
        place = len(self.rules)
        self.rules.append("")
        self.rules[place] = f"{name}: {expression()}"

    def _expression(self, schema: Any) -> str:
        if not self.is_large(schema):
            return f"%json {json.dumps(self._alone(schema))}"
        if "const" in schema:
            return _literal(schema["const"])
        if "enum" in schema:
            return " | ".join(map(_literal, schema["enum"]))
        said = schema.keys() - _NOTES
        if "$ref" in schema:
            _refuse_others(said - {"$ref"})
            return self.rule(self._target(schema["$ref"]))
        if "anyOf" in schema:
            _refuse_others(said - {"anyOf"})
            return " | ".join(map(self.rule, schema["anyOf"]))
        types = schema.get("type") or next(
            (name for name, keys in _OF_TYPES.items() if keys & said), "integer"
        )
        types = [types] if isinstance(types, str) else types
        _refuse_others(said - {"type"}.union(*(_OF_TYPES.get(each, set()) for each in types)))
        write = {"integer": _integers, "array": self._array, "object": self._object}
        alternatives = [
            write[each](schema) if each in write else f"%json {json.dumps({'type': each})}"
            for each in types
        ]
        return " | ".join(f"({each})" for each in alternatives)

    def _alone(self, schema: Any) -> Any:
        """The schema with what its references need."""
        if not isinstance(schema, dict):
            return {} if schema else {"not": {}}
        refs = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(schema)))
        if any(not ref.startswith(_DEFINED) for ref in refs):
            _refuse_others({"$ref to another place than $defs"})
        needed = ("$defs", "definitions") if refs else ()
        defined = {name: self._root[name] for name in needed if name in self._root}
        return {**schema, **defined, "x-guidance": self._options}

    def _array(self, schema: Schema) -> str:
        first = schema.get("prefixItems") or []
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        rest = schema.get("items", True)
        if rest is False:
            most = min(most, len(first))
        parts = [self.rule(each) for each in first[: int(min(most, len(first)))]]
        comma = f'"," {_BLANK} '
        needed = parts[:least]
        text = comma.join(f"{each} " for each in needed)
        if least < len(parts):
            optional = ""
            for number, each in reversed(list(enumerate(parts[least:], least))):
                optional = f"({comma if number else ''}{each} {optional})?"
            if most > len(parts):
                _refuse_others({"prefixItems that are longer than minItems"})
            text += optional
        elif most > len(parts):
            item = self.rule(rest)
            lowest, highest = least - len(parts), most - len(parts)
            if parts:
                text += _times(f"({comma}{item})", lowest, highest)
            else:
                more = f"{item} {_times(f'({comma}{item})', max(0, lowest - 1), highest - 1)}"
                text += more if lowest else f"({more})?"
        return f'"[" {_BLANK} {text} {_BLANK} "]"'

    def _object(self, schema: Schema) -> str:
        if schema.get("additionalProperties", True) is not False:
            _refuse_others({"additionalProperties other than false"})
        named = {
            n: each for n, each in (schema.get("properties") or {}).items() if each is not False
        }
        needed = set(schema.get("required") or ())
        if needed - named.keys():
            _refuse_others({"required names without properties"})
        rest = {True: '""', False: '""'}  # by whether no property comes before
        for name, value in reversed(named.items()):
            item = f'{_literal(name)} {_BLANK} ":" {_BLANK} {self.rule(value)}'
            after = self._named(rest[False])
            with_it = {True: f"{item} {after}", False: f'"," {_BLANK} {item} {after}'}
            if name in needed:
                rest = with_it
            else:
                rest = {first: f"({with_it[first]}) | {self._named(rest[first])}" for first in rest}
        return f'"{{" {_BLANK} {self._named(rest[True])} {_BLANK} "}}"'

    def _named(self, expression: str) -> str:
        """A rule for an expression that is used more than once."""
        if expression == '""':
            return expression
        name = f"rest_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _has_large_bound(schema: Schema) -> bool:
    """Whether a bound is no double, or not within the 64 bits of an integer's."""
    for name in _BOUNDS:
        value = schema.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        large = abs(value) > _LARGEST_EXACT
        if not math.isfinite(value):
            raise _refused(f"{name} is beyond all numbers that JSON readers take")
        beyond = name.startswith("exclusive") or abs(value) >= _LARGEST_BOUND
        if large and beyond and "integer" in _types(schema):
            return True
        if large and isinstance(value, int) and int(float(value)) != value:
            return True
    return False


def _types(schema: Schema) -> list[Any]:
    types = schema.get("type", ["integer"])
    return types if isinstance(types, list) else [types]


def _numbers(schema: Schema) -> Iterator[Any]:
    if "const" in schema:
        yield from _numbers_within(schema["const"])
    if isinstance(schema.get("enum"), list):
        yield from _numbers_within(schema["enum"])


def _numbers_within(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_within(each)
    else:
        yield value


def _is_large(number: Any) -> bool:
    return isinstance(number, int) and abs(number) > _LARGEST_EXACT


def _literal(value: Any) -> str:
    """The JSON text of a value, with blanks where other values may have them."""
    comma = f' "," {_BLANK} '
    if isinstance(value, list):
        return f'"[" {_BLANK} {comma.join(map(_literal, value))} {_BLANK} "]"'
    if isinstance(value, dict):
        pairs = [f'{_literal(k)} {_BLANK} ":" {_BLANK} {_literal(v)}' for k, v in value.items()]
        return f'"{{" {_BLANK} {comma.join(pairs)} {_BLANK} "}}"'
    return json.dumps(json.dumps(value, ensure_ascii=False))


def _times(item: str, least: int, most: float) -> str:
    if most == math.inf:
        return f"{item}*" if not least else f"{item}{{{least},}}"
    return f"{item}{{{least},{int(most)}}}" if most > 0 else '""'


def _integers(schema: Schema) -> str:
    """A pattern of all integers between the bounds; where one is missing, of as many digits as the
    other at least."""
    lowest, highest = _bounds(schema)
    if lowest is None and highest is None:
        lowest, highest = 1 - _LARGEST_EXACT, _LARGEST_EXACT - 1
    elif highest is None:
        assert lowest is not None
        highest = max(_LARGEST_EXACT - 1, 10 ** len(str(abs(lowest))) - 1)
    elif lowest is None:
        lowest = min(1 - _LARGEST_EXACT, 1 - 10 ** len(str(abs(highest))))
    assert lowest is not None
    if lowest > highest:
        raise _refused(f"no integer is at least {lowest} and at most {highest}")
    patterns: list[str] = []
    if lowest < 0:
        patterns.append(f"-({_digits(max(1, -highest), -lowest)})")
    if highest >= 0:
        patterns.append(_digits(max(0, lowest), highest))
    return f"/{'|'.join(patterns)}/"


def _bounds(schema: Schema) -> tuple[int | None, int | None]:
    def _whole(name: str, rounded: Any, step: int) -> list[int]:
        value = schema.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return []
        whole: int = rounded(value)
        return [whole + step if step and whole == value else whole]

    lowest = _whole("minimum", math.ceil, 0) + _whole("exclusiveMinimum", math.ceil, 1)
    highest = _whole("maximum", math.floor, 0) + _whole("exclusiveMaximum", math.floor, -1)
    return max(lowest, default=None), min(highest, default=None)


def _digits(lowest: int, highest: int) -> str:
    """A pattern of the decimal integers from `lowest`, at least 0, to `highest`."""
    patterns, at = [], lowest
    while at <= highest:
        # The longest run of nines that fits: a prefix, one digit of a range, and any digits after it.
        zeros = 0
        while at % 10 ** (zeros + 1) == 0 and at + 10 ** (zeros + 1) - 1 <= highest and at:
            zeros += 1
        size = 10**zeros
        digit = at // size % 10
        last = min(9, digit + (highest + 1 - at) // size - 1)
        prefix = str(at // (10 * size)) if at >= 10 * size else ""
        tail = f"[0-9]{{{zeros}}}" if zeros else ""
        patterns.append(f"{prefix}[{digit}-{last}]{tail}")
        at += (last - digit + 1) * size
    return "|".join(patterns)


def _refuse_others(keywords: Iterable[str]) -> None:
    if names := sorted(keywords):
        raise _refused(
            f"it has integers beyond 2^53, which are served exactly in const, enum, the bounds of an "
            f"integer, properties, items, anyOf and $ref, but not with {', '.join(names)}"
        )


def _refused(why: str) -> RequestError:
    return RequestError("invalid_grammar", f"the json_schema cannot be served: {why}")
