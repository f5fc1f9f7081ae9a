"""`oneOf` whose schemas have no value in common, and `format`s that nothing defines, are served: every
answer validates against the schema as it was written, by `jsonschema`."""

import json
import random
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, FilePath, SecretStr, TypeAdapter

from engine.decoding.grammar.schema import checked_schema
from engine.errors import RequestError
from engine.loop import Engine
from tests.engine.decoding.test_grammars import answer, constrained, make
from tests.engine.helpers import run_until_idle

PROTECTS = ("engine/decoding",)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make()


class Car(BaseModel):
    kind: Literal["car"]
    seats: int = Field(ge=1, le=9)


class Lorry(BaseModel):
    kind: Literal["lorry"]
    tonnes: int = Field(ge=1, le=40)


Vehicle = TypeAdapter(Annotated[Car | Lorry, Field(discriminator="kind")])


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
APART: dict[str, list[dict[str, Any]]] = {
    "types": [{"type": "null"}, NUMBER, {"type": ["boolean"]}],
    "values": [{"enum": ["a", 1]}, {"const": "b"}, {"enum": [True, 2.0]}],
    "other names": [of(a=NUMBER), of(b=NUMBER)],
    "a name more": [of(a=NUMBER) | {"additionalProperties": False}, of(a=NUMBER, b=NUMBER)],
    "a name within": [of(at=of(x={"const": 1})), of(at=of(x={"const": 2}))],
}
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "integers are numbers": [{"type": "integer"}, {"type": "number"}],
    "one number": [{"const": 1}, {"enum": [1.0, 2]}],
    # An answer of the first may have both names, which the second allows too.
    "an optional name": [
        {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]},
        of(b=NUMBER),
    ],
    "no types": [{"required": ["a"]}, {"required": ["b"]}],
}


@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("referred", [False, True])
def test_schemas_without_a_common_value(engine: Engine, case: str, referred: bool) -> None:
    schemas = APART[case]
    wanted: dict[str, Any] = {"oneOf": schemas}
    if referred:
        names = {f"s{place}": each for place, each in enumerate(schemas)}
        wanted = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": names}
    asked = [f"{case} {referred} {seed}" for seed in range(6)]
    for seed, name in enumerate(asked):
        engine.submit(constrained(name, "json_schema", wanted, seed=seed), "g")
    found = run_until_idle(engine)
    for name in asked:
        value = json.loads(answer(found, name))
        jsonschema.Draft202012Validator(wanted).validate(value)


@pytest.mark.parametrize("case", TOGETHER)
def test_a_value_that_two_schemas_share_is_refused_by_name(engine: Engine, case: str) -> None:
    wanted = {
        "oneOf": [{"$ref": "#/$defs/s"}, TOGETHER[case][1]],
        "$defs": {"s": TOGETHER[case][0]},
    }
    with pytest.raises(RequestError, match="two schemas of a oneOf: use anyOf"):
        engine.submit(constrained("q", "json_schema", wanted), "g")


def test_a_union_by_a_discriminator_as_pydantic_writes_it(engine: Engine) -> None:
    schema = Vehicle.json_schema()
    assert "oneOf" in schema and "$ref" in json.dumps(schema)
    for seed in range(8):
        engine.submit(constrained(f"union {seed}", "json_schema", schema, seed=seed), "g")
    found = run_until_idle(engine)
    made = [Vehicle.validate_json(answer(found, f"union {seed}")) for seed in range(8)]
    assert {each.kind for each in made} == {"car", "lorry"}


def test_formats_that_nothing_defines_are_notes(engine: Engine) -> None:
    class Login(BaseModel):
        password: SecretStr = Field(max_length=5)
        key: FilePath

    schema = Login.model_json_schema()
    assert "password" in json.dumps(schema) and "file-path" in json.dumps(schema)
    schema["properties"]["key"]["maxLength"] = 6
    engine.submit(constrained("login", "json_schema", schema), "g")
    jsonschema.validate(json.loads(answer(run_until_idle(engine), "login")), schema)
    with pytest.raises(RequestError, match="format: json-pointer"):
        pointer = {"type": "string", "format": "json-pointer"}
        engine.submit(constrained("r", "json_schema", pointer), "g")


@pytest.mark.proof
def test_what_is_turned_into_any_of_matches_one_schema_at_most() -> None:
    """Values are drawn; each that the schema as it is served allows, the schema as written does too."""
    dice = random.Random(4)
    turned = 0
    for _ in range(3000):
        schemas = [_schema(dice) for _ in range(dice.randrange(2, 4))]
        try:
            served = json.loads(checked_schema(json.dumps({"oneOf": schemas})))
        except RequestError:  # nothing satisfies it
            continue
        if "oneOf" in served:
            continue
        turned += 1
        written = jsonschema.Draft202012Validator({"oneOf": schemas})
        ours = jsonschema.Draft202012Validator(served)
        for value in (_value(dice) for _ in range(30)):
            assert not ours.is_valid(value) or written.is_valid(value), (schemas, value)
    assert turned > 500


def _schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = dice.randrange(5 if depth < 2 else 3)
    if kind == 0:
        return {
            "type": dice.choice(["integer", "number", "string", "boolean", ["null", "integer"]])
        }
    if kind == 1:
        return {"enum": dice.sample([0, 1, 1.0, True, "a", None, {"a": 1}], dice.randrange(1, 4))}
    if kind == 2:
        return {"const": dice.choice([0, 1, 1.0, False, "a"])}
    names = dice.sample(["a", "b", "c"], dice.randrange(1, 3))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(dice, depth + 1) for name in names},
        "required": [name for name in ("a", "b", "c") if dice.random() < 0.5],
    }
    if dice.random() < 0.4:
        made["additionalProperties"] = dice.choice([False, True])
    return made


def _value(dice: random.Random, depth: int = 0) -> Any:
    if depth < 2 and dice.random() < 0.7:
        names = dice.sample(["a", "b", "c"], dice.randrange(3))
        return {name: _value(dice, depth + 1) for name in names}
    return dice.choice([0, 1, 1.0, 2, True, False, "a", "b", None, 0.5])
