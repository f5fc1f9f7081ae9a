"""A value that no model can have is refused with the field's name, in every family."""

import json
from typing import Any

import pytest
import transformers

from engine.errors import CheckpointError
from engine.models.config_fields import FIELDS
from engine.models.registry import FAMILIES, model_spec

WRONG: list[Any] = [
    None, "x", -1, 0.5, 10**400, 1e30, float("nan"), float("inf"), [], [[1]], {}, {"x": 1}, True, 2**40,
    [None], [0.5],
]  # fmt: skip


def written(family: str) -> dict[str, Any]:
    """The family's defaults as transformers writes them."""
    kind = getattr(transformers, family).config_class
    config: dict[str, Any] = json.loads(kind().to_json_string(use_diff=False))
    return config | {"architectures": [family]}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_wrong_values_are_refused_and_never_raise_anything_else(family: str) -> None:
    config = written(family)
    for name in config:
        for value in WRONG:
            try:
                model_spec(config | {name: value})
            except CheckpointError as error:
                assert "config.json" in error.message
                assert "cannot be read as" not in error.message, (name, value)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_field_of_the_table_is_named(name: str) -> None:
    config = written("LlamaForCausalLM")
    if name == "architectures":
        return
    with pytest.raises(CheckpointError, match=name):
        model_spec(config | {name: float("nan")})
