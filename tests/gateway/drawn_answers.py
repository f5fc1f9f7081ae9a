"""Answers of OpenAI-compatible servers, drawn from a seed: what the server means, and the bytes in
which it says so, with the framing and the liberties that real servers take."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

NAMES = ("now", "add_task", "search_x")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in NAMES
]
USAGE = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}
_WORDS = ("toll", "é", "日本", "👍🏽", "a\u2028b", 'say "x"', "\\", "\n", " ", "<b>")
INDEXES = ("own", "same", "none", "late", "far")
EMPTY = ("{}", "", None, "missing", " ")


@dataclass(frozen=True, slots=True)
class Style:
    """How a server writes."""

    end: str  # of a line
    space: str  # after `data:`
    indent: int | None  # of JSON, whose lines are then one `data` line each
    escaped: bool  # all but ASCII, so that a piece may end between the halves of a pair
    mark: bool  # a byte-order mark first
    noise: bool  # comments, and fields that are not `data`
    done: bool  # `[DONE]` at the end
    parts: bool  # content is a list of parts
    indexes: str  # of calls, from INDEXES
    ids: bool
    objects: bool  # arguments are an object
    empty: Any  # what stands for no arguments, from EMPTY
    whole: bool  # a call is one piece
    merged: bool  # all calls are one event
    repeats: bool  # the name and the id stand in each piece
    piece: int  # longest piece of a text, in UTF-16 units


@dataclass(slots=True)
class Drawn:
    style: Style
    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    reason: str = "stop"
    reads: list[bytes] = field(default_factory=list)
    whole: bytes = b""


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    style = _style(rng)
    drawn = Drawn(style)
    kind = rng.choice(("text", "calls", "calls", "both", "refusal"))
    if rng.random() < 0.3 and kind != "refusal":
        drawn.reasoning = "Hm " + _text(rng)
    if kind in ("text", "both"):
        drawn.text = "So " + _text(rng)
    if kind == "refusal":
        drawn.refusal = "No " + _text(rng)
    if kind in ("calls", "both"):
        drawn.calls = [_call(rng, number) for number in range(rng.randint(1, 3))]
        drawn.reason = rng.choice(("tool_calls", "stop"))
    drawn.reads = _cut(rng, _stream(rng, drawn))
    drawn.whole = _whole(drawn)
    return drawn


def _style(rng: random.Random) -> Style:
    whole = rng.random() < 0.4
    style = Style(
        end=rng.choice(("\n", "\n", "\r\n", "\r")),
        space=rng.choice((" ", " ", "")),
        indent=rng.choice((None, None, None, 1)),
        escaped=rng.random() < 0.5,
        mark=rng.random() < 0.1,
        noise=rng.random() < 0.3,
        done=rng.random() < 0.8,
        parts=rng.random() < 0.3,
        indexes=rng.choice(INDEXES),
        ids=rng.random() < 0.8,
        objects=whole and rng.random() < 0.4,
        empty=rng.choice(EMPTY),
        whole=whole,
        merged=whole and rng.random() < 0.5,
        repeats=rng.random() < 0.3,
        piece=rng.randint(1, 9),
    )
    if style.ids or style.indexes in ("own", "far"):
        return style
    # Without ids and indexes only whole calls can be told apart.
    return Style(**{**{name: getattr(style, name) for name in Style.__slots__}, "ids": True})


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 8))) + "."


def _call(rng: random.Random, number: int) -> tuple[str, str, dict[str, Any]]:
    arguments = {} if rng.random() < 0.4 else {"t": _text(rng), "n": rng.randint(0, 9)}
    return f"call_{number}{rng.randint(0, 10**6)}", rng.choice(NAMES), arguments


def _written(style: Style, arguments: dict[str, Any]) -> Any:
    if not arguments and style.empty != "{}":
        return style.empty
    return arguments if style.objects else json.dumps(arguments, ensure_ascii=False)


def _function(name: str | None, arguments: Any) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return named if arguments == "missing" else {**named, "arguments": arguments}


def _pieces(text: str, longest: int) -> list[str]:
    units = text.encode("utf-16-le")
    cut = [units[at : at + 2 * longest] for at in range(0, len(units), 2 * longest)]
    return [each.decode("utf-16-le", "surrogatepass") for each in cut]


def _deltas(drawn: Drawn) -> list[dict[str, Any]]:
    style = drawn.style

    def cut(text: str) -> list[str]:
        if style.escaped:
            return _pieces(text, style.piece)
        return [text[at : at + style.piece] for at in range(0, len(text), style.piece)]

    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": None}]
    if style.parts:
        deltas += [
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": each}]}]}
            for each in cut(drawn.reasoning)
        ]
        deltas += [{"content": [{"type": "text", "text": each}]} for each in cut(drawn.text)]
    else:
        deltas += [{"reasoning_content": each} for each in cut(drawn.reasoning)]
        deltas += [{"content": each} for each in cut(drawn.text)]
    deltas += [{"refusal": each, "content": None} for each in cut(drawn.refusal)]
    calls = [_call_pieces(style, number, call, cut) for number, call in enumerate(drawn.calls)]
    if style.merged and calls:
        deltas.append({"tool_calls": [piece for each in calls for piece in each]})
    else:
        deltas += [{"tool_calls": [piece]} for each in calls for piece in each]
    return deltas


def _call_pieces(
    style: Style, number: int, call: tuple[str, str, dict[str, Any]], cut: Any
) -> list[dict[str, Any]]:
    own_id, name, given = call
    arguments = _written(style, given)
    cuttable = isinstance(arguments, str) and arguments.strip() and arguments != "missing"
    split = cut(arguments) if cuttable and not style.whole else [arguments]
    pieces = []
    for position, each in enumerate(split):
        first = position == 0
        named = first or style.repeats
        piece: dict[str, Any] = {"function": _function(name if named else None, each)}
        if style.ids and (named or style.indexes == "none"):
            piece |= {"id": own_id, "type": "function"}
        index = {"own": number, "same": 0, "far": 5 - number}.get(style.indexes)
        index = number if style.indexes == "late" and not first else index
        pieces.append(piece if index is None else {**piece, "index": index})
    return pieces


def _stream(rng: random.Random, drawn: Drawn) -> bytes:
    style = drawn.style
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in _deltas(drawn)
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": drawn.reason})
    events = [{"id": "x", "choices": [each]} for each in choices]
    events.append({"id": "x", "choices": [], "usage": USAGE})
    sent = b"\xef\xbb\xbf" if style.mark else b""
    for event in events:
        lines = json.dumps(event, ensure_ascii=style.escaped, indent=style.indent).split("\n")
        noise = [": waits", "", "event: message", "id: 1"] if rng.random() < style.noise else []
        framed = [*noise, *(f"data:{style.space}{line}" for line in lines), ""]
        sent += "".join(line + style.end for line in framed).encode()
    return sent + (f"data: [DONE]{style.end * 2}".encode() if style.done else b"")


def _cut(rng: random.Random, sent: bytes) -> list[bytes]:
    longest = rng.choice((3, 40, 900, len(sent)))
    reads, at = [], 0
    while at < len(sent):
        step = rng.randint(1, longest)
        reads.append(sent[at : at + step])
        at += step
    return reads


def _whole(drawn: Drawn) -> bytes:
    style = drawn.style
    message: dict[str, Any] = {"role": "assistant", "content": drawn.text or None}
    if style.parts:
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": drawn.reasoning}]}
        message["content"] = [thought, {"type": "text", "text": drawn.text}]
    elif drawn.reasoning:
        message["reasoning_content"] = drawn.reasoning
    if drawn.refusal:
        message["refusal"] = drawn.refusal
    if drawn.calls:
        message["tool_calls"] = [
            {
                **({"id": own_id} if style.ids else {}),
                "type": "function",
                "function": _function(name, _written(style, arguments)),
            }
            for own_id, name, arguments in drawn.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": drawn.reason}
    return json.dumps({"choices": [choice], "usage": USAGE}, ensure_ascii=style.escaped).encode()
