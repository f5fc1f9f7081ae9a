"""Weight files in safetensors, and their index."""

import json
import random
import struct
from pathlib import Path
from typing import Any

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

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = (
    "F64", "I8", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64", "F16", "BF16", "U16",
    "X", "", None, 3, "f32",
)  # fmt: skip
_LENGTHS = (0, 1, 2, 7, 8, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 100_000_000, 100_000_001)
_SHARDS: tuple[Any, ...] = (
    "../../x.safetensors", "/dev/zero", "/etc/passwd", "..", "", ".", "config.json", "a\0b",
    "a" * 5000, "\ud800.safetensors", "model-00001-of-00002.safetensors", 3, None, [], {"x": 1},
)  # fmt: skip
_VALUES = (float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, -0.0)


def safetensors_cases(bases: Path, file: str = WEIGHTS, families: tuple[str, ...] = ()) -> Draw:
    """Of the models in `bases`, or of those named."""
    folders = [bases / each for each in families] or [
        each for each in sorted(bases.iterdir()) if (each / file).is_file()
    ]

    def _draw(draw: random.Random) -> Case:
        base = draw.choice(folders)
        name, files = hostile_weights(draw, base, file)
        return Case(
            f"{base.name} {name}", base, files, (), works=("engine",), answers=False,
            places=frozenset((file, "config.json", "case")),  # a tensor is missing in the folder
        )  # fmt: skip

    return _draw


def hostile_weights(draw: random.Random, base: Path, file: str) -> tuple[str, dict[str, bytes]]:
    """What was done, and the files."""
    raw = (base / file).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    head, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    kind = draw.random()
    if kind < 0.15 and file == WEIGHTS:
        return _index(draw, [name for name in head if name != "__metadata__"])
    if kind < 0.25:
        return _flipped(draw, raw, length)
    if kind < 0.32:
        cut = draw.randrange(len(raw))
        return f"cut at {cut}", {file: raw[:cut]}
    if kind < 0.37:
        name = draw.choice(list(BROKEN))
        return f"{file} is {name}", {file: BROKEN[name]}
    if kind < 0.47:
        value, place = draw.choice(_VALUES), draw.randrange(len(data) // 4) * 4
        packed = struct.pack("<f", value)
        return f"{value} at {place}", {file: raw[: 8 + length + place] + packed + data[place + 4 :]}
    if kind < 0.52:
        told = draw.choice(_LENGTHS)
        return f"header of {told}", {file: told.to_bytes(8, "little") + raw[8:]}
    label, changed_head = _header(draw, head, len(data))
    text = written(changed_head)
    if draw.random() < 0.05:
        data += b"x" * draw.choice((1, 100, 4096))
    return label, {file: len(text).to_bytes(8, "little") + text + data}


def _flipped(draw: random.Random, raw: bytes, length: int) -> tuple[str, dict[str, bytes]]:
    content = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 5))):
        content[draw.randrange(8 + length)] = draw.randrange(256)
    return "flipped bytes", {WEIGHTS: bytes(content)}


def _header(draw: random.Random, head: dict[str, Any], size: int) -> tuple[str, Any]:
    names = [name for name in head if name != "__metadata__"]
    name = draw.choice(names)
    match draw.randrange(8):
        case 0:
            kind = draw.choice(_DTYPES)
            return f"{name} dtype {kind!r}", changed(head, (name, "dtype"), kind)
        case 1:
            other = draw.choice(names)
            return f"{name} at {other}", changed(
                head, (name, "data_offsets"), head[other]["data_offsets"]
            )
        case 2:
            odd_name = draw.choice(("\0../x", "\ud800", "\x1b[31mX\n\nok", "a" * 1_000_000, ""))
            rest = {key: each for key, each in head.items() if key != name}
            return f"{name} as {shown(odd_name)}", rest | {odd_name: head[name]}
        case 3:
            many = {f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [size, size]}
                    for n in range(draw.choice((1, 50_000)))}  # fmt: skip
            return f"{len(many)} empty tensors more", head | many
        case 4:
            return f"{name} absent", without(head, (name,))
        case 5:
            other = draw.choice(names)
            return f"{name} and {other} swapped", head | {name: head[other], other: head[name]}
        case _:
            path = draw.choice([each for each in places(head, 4000) if each[0] == name])
            value = odd(draw, at(head, path))
            return f"{'.'.join(map(str, path))} = {shown(value)}", changed(head, path, value)


def _index(draw: random.Random, names: list[str]) -> tuple[str, dict[str, bytes]]:
    placed: dict[str, Any] = dict.fromkeys(names, WEIGHTS)
    whole: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": placed}
    match draw.randrange(6):
        case 0:
            name = draw.choice(list(BROKEN))
            return f"{INDEX} is {name}", {INDEX: BROKEN[name]}
        case 1:
            value = odd(draw, placed)
            return f"weight_map = {shown(value)}", {INDEX: written(whole | {"weight_map": value})}
        case 2:
            shard = draw.choice(_SHARDS)
            chosen = names if draw.random() < 0.5 else [draw.choice(names)]
            mapping = placed | dict.fromkeys(chosen, shard)
            return f"shard {shown(shard)}", {INDEX: written(whole | {"weight_map": mapping})}
        case 3:
            mapping = placed | {draw.choice(("ghost", "", "model.layers.99.x")): WEIGHTS}
            return "a ghost", {INDEX: written(whole | {"weight_map": mapping})}
        case 4:
            return "fewer names", {
                INDEX: written({"weight_map": dict.fromkeys(names[1:], WEIGHTS)})
            }
        case _:
            return "no metadata", {INDEX: written({"weight_map": placed})}
