"""A field that config.json leaves out has the value of transformers' own configuration class."""

import json
from dataclasses import fields
from typing import Any

import pytest
import transformers

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.registry import FAMILIES, model_spec

# `eos` comes from generation_config.json as well; `rope` is compared by theta and kind.
_APART = {"eos", "rope", "local_rope"}
_KINDS = {name: getattr(transformers, name).config_class for name in FAMILIES}
_PLAIN = sorted(name for name in FAMILIES if "Conditional" not in name)


def read(config: dict[str, Any], family: str) -> ModelSpec | None:
    """None where it is refused."""
    try:
        return model_spec(config | {"architectures": [family]})
    except CheckpointError:
        return None


def completed(family: str, config: dict[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(_KINDS[family](**config).to_json_string(use_diff=False))
    return written


@pytest.mark.parametrize("family", _PLAIN)
@pytest.mark.parametrize("hidden", [None, 2048])
def test_an_absent_field_has_the_default_of_transformers(family: str, hidden: int | None) -> None:
    whole = completed(family, {"hidden_size": hidden} if hidden else {})
    compared = 0
    for name in whole.keys() - {"architectures", "model_type", "layer_types", "num_hidden_layers"}:
        less = {k: v for k, v in whole.items() if k not in (name, "layer_types")}
        ours = read(less, family)
        if ours is None:
            continue  # refused by name is right too
        theirs = read(completed(family, less) | {"model_type": whole["model_type"]}, family)
        assert theirs is not None, name
        for each in fields(ModelSpec):
            if each.name not in _APART:
                assert getattr(ours, each.name) == getattr(theirs, each.name), (name, each.name)
        assert [(r.theta, r.kind) for r in ours.ropes] == [
            (r.theta, r.kind) for r in theirs.ropes
        ], name
        compared += 1
    assert compared > 5
