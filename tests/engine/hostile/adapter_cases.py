"""Adapters: `adapter_config.json` by every field that PEFT writes, and their tensors."""

import json
import random
from pathlib import Path

from tests.engine.hostile.case import Case, Draw
from tests.engine.hostile.odd_values import (
    BROKEN,
    at,
    changed,
    odd,
    places,
    shown,
    without,
    written,
)
from tests.engine.hostile.safetensors_files import hostile_weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PATTERNS: tuple[object, ...] = (
    {"q_proj": 4}, {"q_proj": 8}, {"(": 3}, {"(a+)+$": 4}, {"(([a-z0-9_.]+)+)+!": 4}, {"": 4}, {".*": 4},
    {"q_proj": "x"}, {"q_proj": None}, {"q_proj": True}, {"q_proj": float("nan")}, {"q_proj": 10**30},
    {"\ud800": 4}, {"a" * 600: 4}, {f"m{n}": 4 for n in range(5000)}, {"layers.[01]": -1},
)  # fmt: skip


def adapter_cases(bases: Path) -> Draw:
    folders = sorted((bases / "adapters").iterdir())
    configs = {folder: json.loads((folder / CONFIG).read_text()) for folder in folders}

    def _draw(draw: random.Random) -> Case:
        base = draw.choice(folders)
        config, kind = configs[base], draw.random()
        if kind < 0.4:
            label, files = hostile_weights(draw, base, WEIGHTS)
            files = {WEIGHTS: next(iter(files.values()))}
        elif kind < 0.5:
            label = draw.choice(list(BROKEN))
            files = {CONFIG: BROKEN[label]}
        elif kind < 0.6:
            field, patterns = draw.choice(("rank_pattern", "alpha_pattern")), draw.choice(_PATTERNS)
            label, files = (
                f"{field} = {shown(patterns)}",
                {CONFIG: written(config | {field: patterns})},
            )
        else:
            path = draw.choice(places(config))
            label = ".".join(map(str, path))
            if draw.random() < 0.12:
                label, tree = f"{label} absent", without(config, path)
            else:
                value = odd(draw, at(config, path))
                label, tree = f"{label} = {shown(value)}", changed(config, path, value)
            files = {CONFIG: written(tree)}
        return Case(
            f"{base.name} {label}", base, files, (), works=("adapter",), answers=False,
            places=frozenset((CONFIG, WEIGHTS)),
        )  # fmt: skip

    return _draw
