"""A random sample of JSON schemas: every answer that finishes validates by `jsonschema`.

`SCHEMAS=1000 pytest tests/engine/decoding/test_schema_sample.py` takes a larger one.
"""

import json
import os
import random
from typing import Any

import jsonschema

from engine.errors import RequestError
from tests.engine.decoding.test_grammars import answer, constrained, make
from tests.engine.helpers import Collected

COUNT = int(os.environ.get("SCHEMAS", "80"))
VALUES: list[Any] = ["a", "b c", 1, 2.5, None, True, [1, 2], {"x": 1}, 'ü"q']
SIMPLE: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"type": "string", "pattern": "^\\d{4}-\\d{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
]


def schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = [text, number, simple] + ([record, record, items, either] if depth < 3 else [])
    return dice.choice(kinds)(dice, depth)


def simple(dice: random.Random, _: int) -> dict[str, Any]:
    if dice.random() < 0.5:
        return {"enum": dice.sample(VALUES, dice.randrange(1, 5))}
    return dice.choice([*SIMPLE, {"const": dice.choice(VALUES)}])


def text(dice: random.Random, _: int) -> dict[str, Any]:
    most = dice.randrange(1, 12)
    return {"type": "string", "maxLength": most, "minLength": dice.randrange(0, most + 1)}


def number(dice: random.Random, _: int) -> dict[str, Any]:
    low = dice.randrange(-50, 50)
    bounds: dict[str, Any] = {"minimum": low, "maximum": low + dice.randrange(10, 90)}
    kind = dice.choice(["integer", "number"])
    if kind == "integer" and dice.random() < 0.3:
        bounds["multipleOf"] = dice.choice([2, 5, 10])
    return {"type": kind} | {name: bounds[name] for name in bounds if dice.random() < 0.7}


def items(dice: random.Random, depth: int) -> dict[str, Any]:
    if dice.random() < 0.3:
        first = [schema(dice, depth + 1) for _ in range(dice.randrange(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    most = dice.randrange(1, 4)
    least = dice.randrange(0, most + 1)
    each = schema(dice, depth + 1)
    return {"type": "array", "items": each, "maxItems": most, "minItems": least}


def either(dice: random.Random, depth: int) -> dict[str, Any]:
    name = "oneOf" if dice.random() < 0.3 else "anyOf"
    return {name: [schema(dice, depth + 1) for _ in range(dice.randrange(1, 4))]}


def record(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(["a", "b", "name", "id", "zip code", "ü"], dice.randrange(0, 5))
    return {
        "type": "object",
        "properties": {name: schema(dice, depth + 1) for name in names},
        "required": [name for name in names if dice.random() < 0.7],
        "additionalProperties": dice.random() < 0.2,
    }


def test_every_finished_answer_validates() -> None:
    dice = random.Random(1)
    engine = make(max_running=16)
    finished = refused = 0
    for first in range(0, COUNT, 40):
        asked: dict[str, dict[str, Any]] = {}
        for number_of in range(first, min(first + 40, COUNT)):
            name, wanted = f"q{number_of}", schema(dice)
            try:
                request = constrained(name, "json_schema", wanted, max_tokens=150, seed=number_of)
                engine.submit(request, "g")
            except RequestError as error:
                assert error.code == "invalid_grammar"
                refused += 1
                continue
            asked[name] = wanted
        found = Collected()
        while engine.busy:
            engine.step()
            found.take(engine)
        for name, wanted in asked.items():
            if found.reasons[name, 0] != "stop":
                assert found.reasons[name, 0] == "length"
                continue
            checker = jsonschema.FormatChecker()
            validator = jsonschema.Draft202012Validator(wanted, format_checker=checker)
            validator.validate(json.loads(answer(found, name)))
            finished += 1
    assert finished > 0.75 * COUNT
    assert refused < 0.1 * COUNT
