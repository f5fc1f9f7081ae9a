"""The input file of a batch: one JSON object per line, validated in full before any request runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

MOST_LINES = 50_000
MOST_ERRORS = 100
_LONGEST_ID = 512


@dataclass
class Checked:
    errors: list[dict[str, Any]] = field(default_factory=list)
    lines: int = 0
    model: str | None = None  # of the first line


def check(lines: Iterable[bytes], endpoint: str, most_bytes: int) -> Checked:
    """Validate a file. `errors` have the form of OpenAI's batch errors; `line` counts from 1."""
    found, seen = Checked(), set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        found.lines += 1
        wrong = _wrong(line, endpoint, most_bytes, seen)
        if wrong is not None:
            code, message, param = wrong
            found.errors.append({"code": code, "message": message, "param": param, "line": number})
        elif found.model is None:
            found.model = str(orjson.loads(line)["body"]["model"])
        if len(found.errors) >= MOST_ERRORS or found.lines > MOST_LINES:
            break
    if found.lines == 0:
        found.errors.append(_whole("empty_file", "The file contains no requests."))
    if found.lines > MOST_LINES:
        message = f"The file has more than {MOST_LINES} requests, the most that a batch may have."
        found.errors.append(_whole("too_many_requests", message))
    return found


def requests(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(custom id, body as JSON) of each line of a validated file."""
    for line in lines:
        if line.strip():
            told = orjson.loads(line)
            yield told["custom_id"], orjson.dumps(told["body"]).decode()


def _wrong(
    line: bytes, endpoint: str, most_bytes: int, seen: set[str]
) -> tuple[str, str, str | None] | None:
    if len(line) > most_bytes:
        return "line_too_long", f"The line is longer than {most_bytes >> 20} MiB.", None
    try:
        told = orjson.loads(line)
    except ValueError:
        return "invalid_json_line", "The line is not one JSON object in UTF-8.", None
    if not isinstance(told, dict):
        return "invalid_json_line", "The line is not a JSON object.", None
    name, body = told.get("custom_id"), told.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_ID or not name.isprintable():
        told_so = f"custom_id must be 1 to {_LONGEST_ID} printable characters."
        return "invalid_custom_id", told_so, "custom_id"
    if name in seen:
        return "duplicate_custom_id", f"custom_id {name[:80]!r} is used twice.", "custom_id"
    seen.add(name)
    if told.get("method") != "POST":
        return "invalid_method", "method must be POST.", "method"
    if told.get("url") != endpoint:
        return "mismatched_url", f"url must be {endpoint}, the endpoint of the batch.", "url"
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return "invalid_body", "body must be an object that names a model.", "body"
    if body.get("stream"):
        return "invalid_body", "stream must be false in a batch.", "body.stream"
    return None


def _whole(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
