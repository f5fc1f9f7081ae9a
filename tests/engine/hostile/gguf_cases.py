"""GGUF files: metadata by their types and values, tensor tables, flipped bytes."""

import random
import struct
from dataclasses import dataclass
from pathlib import Path

from tests.engine.hostile.case import Case, Draw

_COUNTS = (0, 1, 2, 3, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e30, 3e38, float("nan"), float("inf"), -float("inf"), 0.5)
_TEXTS = (
    "",
    "x",
    "llama",
    "qwen2",
    "gemma2",
    "gpt2",
    "yarn",
    "\n",
    "\0",
    "\u00e9" * 3,
    "a" * 70_000,
    "{{",
)
# Numbers of the format's value types: their sizes in bytes.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _LIST = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    """A metadata value's place in the file."""

    key: str
    start: int  # of its key's length
    kind: int  # of the number of its type
    end: int


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    shape: int  # where its rank stands
    rank: int
    end: int


def gguf_cases(bases: Path) -> Draw:
    files = sorted((bases / "gguf").iterdir())
    known = {file: (file.read_bytes(), *_layout(file.read_bytes())) for file in files}

    def _draw(draw: random.Random) -> Case:
        file = draw.choice(files)
        raw, entries, tables = known[file]
        name, content = _hostile(draw, raw, entries, tables)
        return Case(
            f"{file.stem} {name}", bases / "gguf", {file.name: content}, (), model=file.name,
            answers=False,
        )  # fmt: skip

    return _draw


def _layout(raw: bytes) -> tuple[list[Entry], list[Table]]:
    tensors, values = struct.unpack_from("<QQ", raw, 8)
    at, entries, tables = 24, [], []
    for _ in range(values):
        start = at
        key, at = _text(raw, at)
        kind_at, at = at, at + 4
        at = _after(raw, at, struct.unpack_from("<I", raw, kind_at)[0])
        entries.append(Entry(key, start, kind_at, at))
    for _ in range(tensors):
        name, at = _text(raw, at)
        rank = struct.unpack_from("<I", raw, at)[0]
        tables.append(Table(name, at, rank, at + 4 + 8 * rank + 12))
        at = tables[-1].end
    return entries, tables


def _text(raw: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", raw, at)
    return raw[at + 8 : at + 8 + length].decode(), at + 8 + length


def _after(raw: bytes, at: int, kind: int) -> int:
    if kind == _TEXT:
        return _text(raw, at)[1]
    if kind != _LIST:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    for _ in range(count if inner == _TEXT else 0):
        at = _text(raw, at)[1]
    return at if inner == _TEXT else at + count * _SIZES[inner]


def _hostile(
    draw: random.Random, raw: bytes, entries: list[Entry], tables: list[Table]
) -> tuple[str, bytes]:
    head = tables[-1].end
    match draw.randrange(10):
        case 0:
            cut = draw.randrange(len(raw))
            return f"cut at {cut}", raw[:cut]
        case 1:
            content = bytearray(raw)
            for _ in range(draw.choice((1, 1, 2, 5))):
                content[draw.randrange(head)] = draw.randrange(256)
            return "flipped bytes", bytes(content)
        case 2:
            content = bytearray(raw)
            at = draw.randrange(head, len(raw) - 4)
            content[at : at + 4] = struct.pack("<f", draw.choice(_FLOATS))
            return f"a value at {at}", bytes(content)
        case 3:
            at, form = draw.choice(((4, "<I"), (8, "<Q"), (16, "<Q")))
            told = draw.choice(_COUNTS) % 2 ** (32 if form == "<I" else 64)
            return f"{told} at {at}", raw[:at] + struct.pack(form, told) + raw[
                at + len(struct.pack(form, 0)) :
            ]
        case 4 | 5:
            return _tensor(draw, raw, draw.choice(tables))
        case _:
            return _metadata(draw, raw, draw.choice(entries))


def _tensor(draw: random.Random, raw: bytes, table: Table) -> tuple[str, bytes]:
    place = draw.randrange(table.rank + 3)
    if place == 0:
        at, form, value = table.shape, "<I", draw.choice(_COUNTS[:11])
    elif place <= table.rank:
        at, form, value = table.shape + 4 + 8 * (place - 1), "<Q", draw.choice(_COUNTS)
    elif place == table.rank + 1:
        at, form, value = table.end - 12, "<I", draw.randrange(42)
    else:
        at, form, value = table.end - 8, "<Q", draw.choice((*_COUNTS, 32, 64, 4096))
    packed = struct.pack(form, value)
    return f"{table.name} {place}: {value}", raw[:at] + packed + raw[at + len(packed) :]


def _metadata(draw: random.Random, raw: bytes, entry: Entry) -> tuple[str, bytes]:
    match draw.randrange(6):
        case 0:
            count = struct.unpack_from("<Q", raw, 16)[0] - 1
            content = raw[:16] + struct.pack("<Q", count) + raw[24 : entry.start] + raw[entry.end :]
            return f"{entry.key} absent", content
        case 1:
            count = struct.unpack_from("<Q", raw, 16)[0] + 1
            twice = raw[entry.start : entry.end]
            return f"{entry.key} twice", raw[:16] + struct.pack("<Q", count) + twice + raw[24:]
        case 2:
            kind = draw.randrange(15)
            return f"{entry.key} type {kind}", raw[: entry.kind] + struct.pack("<I", kind) + raw[
                entry.kind + 4 :
            ]
        case _:
            value = _odd(draw)
            return f"{entry.key} = {value[:24]!r}", raw[: entry.kind] + value + raw[entry.end :]


def _odd(draw: random.Random) -> bytes:
    """A value of any type, with its type."""
    kind = draw.choice((*_SIZES, _TEXT, _TEXT, _LIST))
    if kind == _TEXT:
        return struct.pack("<I", kind) + _packed(draw.choice(_TEXTS))
    if kind != _LIST:
        return struct.pack("<I", kind) + _number(draw, kind)
    inner, count = draw.choice((*_SIZES, _TEXT, _LIST)), draw.choice((0, 1, 3, 288, 5000))
    parts = [_packed(draw.choice(_TEXTS[:-2])) if inner == _TEXT else _number(draw, inner)
             for _ in range(count)]  # fmt: skip
    return struct.pack("<IIQ", kind, inner, count) + b"".join(parts)


def _packed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _number(draw: random.Random, kind: int) -> bytes:
    if kind in (6, 12):
        return struct.pack("<f" if kind == 6 else "<d", draw.choice(_FLOATS))
    size = _SIZES.get(kind, 4)
    return (draw.choice(_COUNTS) % (1 << 8 * size)).to_bytes(size, "little")
