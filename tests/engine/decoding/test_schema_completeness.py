"""The masks of a schema allow every value that a validator accepts, but for what the schema leaves open:
other names than an object has, and numbers of more digits than anybody reads.

Values are drawn here, without the code that reads schemas; `jsonschema` judges them.
"""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.decoding.grammar.compiler import refused, source_of
from engine.errors import RequestError
from engine.loop import Engine
from engine.protocol import Grammar
from tests.engine.decoding.test_grammars import TOKENIZER, answer, constrained, make
from tests.engine.helpers import run_until_idle

PROTECTS = ("engine/decoding",)
EDGES = [2**53 - 1, 2**53 + 1, 2**63 - 1, 2**64 - 1, 1234567890123456789]
NAMES = ["id", "name", "kind", "ü", "zip code"]


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.to_str())


class Allowed:
    """What the grammar of a schema takes, token by token, and may end with."""

    def __init__(self, schema: Any) -> None:
        source = source_of(Grammar("json_schema", json.dumps(schema)))
        self._matcher = LLMatcher(_tokenizer(), source, log_level=0)
        if self._matcher.is_error():
            raise refused("json_schema", self._matcher.get_error())

    def takes(self, value: Any) -> bool:
        self._matcher.reset()
        tokens = _tokenizer().tokenize_str(json.dumps(value, ensure_ascii=False))
        taken = self._matcher.try_consume_tokens(tokens)
        return taken == len(tokens) and self._matcher.is_accepting()

    def takes_in_some_order(self, value: Any) -> bool:
        """The names of an object come in the order of its schema, which composition mixes."""
        dice = random.Random(1)
        return self.takes(value) or any(self.takes(shuffled(value, dice)) for _ in range(ORDERS))


ORDERS = 400


def shuffled(value: Any, dice: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled(each, dice) for each in value]
    if not isinstance(value, dict):
        return value
    names = list(value)
    dice.shuffle(names)
    return {name: shuffled(value[name], dice) for name in names}


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


class Drawn:
    """A schema of a kind that libraries write, and values for it, right and almost right."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        root = self.one(0)
        return root | ({"$defs": self.definitions} if self.definitions else {})

    def one(self, depth: int) -> dict[str, Any]:
        kinds = [self.number, self.constant, self.number, self.text]
        if depth < 3:
            kinds += [
                self.record,
                self.record,
                self.inherited,
                self.union,
                self.listed,
                self.either,
            ]
        return self.dice.choice(kinds)(depth)

    def number(self, _: int) -> dict[str, Any]:
        low = self.dice.choice([0, -5, *EDGES, -(2**63)])
        bounds = {"minimum": low, "maximum": low + self.dice.choice([0, 3, 1000, 10**18])}
        kept = {name: value for name, value in bounds.items() if self.dice.random() < 0.7}
        return {"type": self.dice.choice(["integer", "integer", ["integer", "null"]]), **kept}

    def constant(self, _: int) -> dict[str, Any]:
        values = [*EDGES, 7, "a", None, True, {"n": EDGES[1]}, [EDGES[4], 1]]
        picked = self.dice.sample(values, 3)
        return self.dice.choice([{"const": picked[0]}, {"enum": picked}])

    def text(self, _: int) -> dict[str, Any]:
        return {"type": "string", "maxLength": 4}

    def record(self, depth: int) -> dict[str, Any]:
        names = self.dice.sample(NAMES, self.dice.randrange(1, 4))
        needed = [name for name in names if self.dice.random() < 0.5]
        properties = {name: self.one(depth + 1) for name in names}
        more = {} if self.dice.random() < 0.7 else {"additionalProperties": False}
        return {"type": "object", "properties": properties, "required": needed, **more}

    def defined(self, depth: int) -> str:
        name = self.dice.choice(["Base", "Page<User>", "a/b~c"]) + str(len(self.definitions))
        self.definitions[name] = {}
        made = self.record(depth)
        made.pop("additionalProperties", None)
        self.definitions[name] = made
        step = name.replace("~", "~0").replace("/", "~1")
        return f"#/$defs/{step}".replace("<", "%3C").replace(">", "%3E")

    def inherited(self, depth: int) -> dict[str, Any]:
        own = self.record(depth)
        own.pop("additionalProperties", None)
        return {**own, "$ref": self.defined(depth + 1)}

    def union(self, depth: int) -> dict[str, Any]:
        own = self.record(depth)
        own.pop("additionalProperties", None)
        options = []
        for _ in range(self.dice.randrange(1, 4)):
            option = self.record(depth + 1)
            option.pop("additionalProperties", None)
            options.append(self.dice.choice([option, {"$ref": self.defined(depth + 1)}]))
        return {**own, "anyOf": options}

    def listed(self, depth: int) -> dict[str, Any]:
        least = self.dice.randrange(0, 2)
        most = {"maxItems": least + 2} if self.dice.random() < 0.7 else {}
        return {"type": "array", "items": self.one(depth + 1), "minItems": least, **most}

    def either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.one(depth + 1) for _ in range(2)]}

    def value(self, schema: Any, depth: int = 0) -> Any:
        """A value that is likely to be valid, with the schema's own names in their order."""
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.dice.choice(schema["enum"])
        found: Any = None
        if "$ref" in schema:
            path = schema["$ref"].replace("%3C", "<").replace("%3E", ">")
            name = path.removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~")
            found = self.value(self.definitions[name], depth)
        if "anyOf" in schema:
            found = self.value(self.dice.choice(schema["anyOf"]), depth)
        kind = schema.get("type")
        if kind == "object":
            needed = schema.get("required", [])
            own = {
                name: self.value(each, depth + 1)
                for name, each in schema["properties"].items()
                if name in needed or self.dice.random() < 0.6
            }
            return {**own, **found} if isinstance(found, dict) else own
        if kind == "array":
            least = schema.get("minItems", 0)
            count = self.dice.randrange(least, schema.get("maxItems", least + 2) + 1)
            return [self.value(schema["items"], depth + 1) for _ in range(count)]
        if kind == "string":
            return self.dice.choice(["", "abcd", "ü", "7"])
        if kind in ("integer", ["integer", "null"]):
            low, high = schema.get("minimum"), schema.get("maximum")
            low = (high - 9 if high is not None else -9) if low is None else low
            high = low + 9 if high is None else high
            return self.dice.choice([low, high, (low + high) // 2])
        return found


def _check(seeds: range) -> tuple[int, int]:
    count = refusals = 0
    for seed in seeds:
        drawn = Drawn(random.Random(seed))
        schema = drawn.schema()
        try:
            allowed = Allowed(schema)
        except RequestError as error:
            assert "2^53" in error.message or "nsatisfiable" in error.message, (seed, error.message)
            # Next to a large integer, an optional property that nothing satisfies refuses the schema.
            if "nsatisfiable" in error.message and "served: at" not in error.message:
                assert not any(is_valid(schema, drawn.value(schema)) for _ in range(4)), seed
            refusals += 1
            continue
        for _ in range(4):
            value = drawn.value(schema)
            count += 1
            fits = allowed.takes_in_some_order(value) if is_valid(schema, value) else None
            assert fits is not False, (seed, schema, value)
            assert fits or not allowed.takes(value), (seed, schema, value)
    return count, refusals


def test_every_valid_value_is_allowed_and_no_other() -> None:
    count, refusals = _check(range(150))
    assert count > 300 and refusals < 75


@pytest.mark.proof
def test_every_valid_value_of_many_schemas_is_allowed() -> None:
    count, refusals = _check(range(1_000, 3_000))
    assert count > 4_000 and refusals < 1_000


COMPOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a base": (
        {
            "$defs": {"Base": {"type": "object", "properties": {"id": {"type": "integer"}}}},
            "$ref": "#/$defs/Base",
            "properties": {"name": {"type": "string"}},
        },
        [{}, {"name": "x"}, {"id": 1}, {"name": "x", "id": 1}],
        [{"other": 1}],
    ),
    "an alternative that narrows": (
        {
            "type": "object",
            "properties": {"title": {"const": "t"}, "kind": {"enum": ["x", "y"]}},
            "required": ["title", "kind"],
            "anyOf": [
                {"properties": {"kind": {"const": "x"}}},
                {"properties": {"kind": {"const": "y"}}},
            ],
        },
        [{"title": "t", "kind": "x"}, {"title": "t", "kind": "y"}],
        [{"title": "t"}, {"title": "t", "kind": "x", "other": 1}],
    ),
    "alternatives with names of their own": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "anyOf": [{"properties": {"b": {"const": 2}}}, {"properties": {"c": {"const": 3}}}],
        },
        [{"a": 1, "b": 2}, {"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}],
        [{"a": 1, "d": 4}],
    ),
    "a base that is used alone, too": (
        {
            "$defs": {
                "B": {"type": "object", "properties": {"id": {"const": 1}}},
                "C": {"$ref": "#/$defs/B", "properties": {"n": {"const": 2}}},
            },
            "type": "object",
            "properties": {"b": {"$ref": "#/$defs/B"}, "c": {"$ref": "#/$defs/C"}},
        },
        [{"b": {"id": 1}, "c": {"n": 2, "id": 1}}, {}],
        [{"b": {"n": 2}}, {"c": {"other": 1}}],
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_objects_have_the_names_of_all_their_schemas(name: str) -> None:
    schema, right, wrong = COMPOSED[name]
    allowed = Allowed(schema)
    for value in right:
        assert is_valid(schema, value) and allowed.takes_in_some_order(value), value
    assert not any(map(allowed.takes_in_some_order, wrong))


SERVED = {
    "percent-encoded": ({"$defs": {"P<U>": {"const": 1}}, "$ref": "#/$defs/P%3CU%3E"}, 1),
    "anchor": ({"$defs": {"A": {"$anchor": "foo", "const": 5}}, "$ref": "#foo"}, 5),
    "not unique": ({"type": "array", "items": {"const": 1}, "uniqueItems": False}, [1, 1]),
    "a count as a fraction": ({"type": "array", "items": {"const": 1}, "minItems": 1.0}, [1]),
    "a count without contains": ({"type": "array", "items": {"const": 1}, "minContains": 2}, []),
    "evaluated": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "additionalProperties": False,
            "unevaluatedProperties": False,
        },
        {"a": 1},
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_valid_schemas_are_served(name: str) -> None:
    schema, value = SERVED[name]
    assert is_valid(schema, value) and Allowed(schema).takes(value)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": 5}, "type is 5: use one of string, number"),
        ({"type": "not-a-type"}, 'type is "not-a-type"'),
        ({"allOf": [{"const": 2**53 + 1}]}, "integers beyond 2^53"),
        ({"type": "integer", "minimum": 2**53 + 1, "multipleOf": 3}, "not with multipleOf"),
        ({"type": "integer", "minimum": 2**64 + 9, "maximum": 2**64}, "no integer is at least"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        source_of(Grammar("json_schema", json.dumps(schema)))
    assert says in refusal.value.message


OPEN: list[dict[str, Any]] = [
    {"type": "number"},
    {"type": "number", "minimum": 0},
    {"type": "integer", "minimum": 1},
    {"type": "integer", "exclusiveMaximum": 0},
    {"type": "integer", "multipleOf": 7},
    {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make()


def test_numbers_that_a_schema_leaves_open_end(engine: Engine) -> None:
    asked = {f"{n} {seed}": schema for n, schema in enumerate(OPEN) for seed in range(4)}
    for place, (name, schema) in enumerate(asked.items()):
        engine.submit(constrained(name, "json_schema", schema, seed=place), "g")
    found = run_until_idle(engine)
    for name, schema in asked.items():
        value = json.loads(answer(found, name))
        assert is_valid(schema, value), (schema, value)
        assert found.reasons[name, 0] == "stop"
