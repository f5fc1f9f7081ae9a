"""The input file of a batch: one JSON object per line, validated in full before any request runs."""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from core.errors import BadRequest
from gateway.edge.decoding import check_json_size

MAX_LINES = 50_000
_MOST_EMPTY = 50_000  # lines
MAX_ERRORS = 100
_LONGEST_ID = 512


@dataclass
class ValidationResult:
    errors: list[dict[str, Any]] = field(default_factory=list)
    lines: int = 0
    model: str | None = None  # of the first line


def validate(lines: Iterable[bytes], endpoint: str, max_bytes: int) -> ValidationResult:
    """Validate a file. `errors` have the form of OpenAI's batch errors; `line` counts from 1."""
    result, seen = ValidationResult(), set[str]()
    for number, line in enumerate(_without_mark(lines), 1):
        if not line.strip():
            if number - result.lines > _MOST_EMPTY:
                message = f"The file has more than {_MOST_EMPTY} empty lines."
                result.errors.append(_file_error("too_many_lines", message))
                return result
            continue
        result.lines += 1
        error = _line_error(line, endpoint, max_bytes, seen)
        if error is not None:
            code, message, param = error
            result.errors.append({"code": code, "message": message, "param": param, "line": number})
        elif result.model is None:
            result.model = str(orjson.loads(line)["body"]["model"])
        if len(result.errors) >= MAX_ERRORS or result.lines > MAX_LINES:
            break
    if result.lines == 0:
        result.errors.append(_file_error("empty_file", "The file contains no requests."))
    if result.lines > MAX_LINES:
        message = f"The file has more than {MAX_LINES} requests, the most that a batch may have."
        result.errors.append(_file_error("too_many_requests", message))
    return result


def read_requests(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(custom id, body as JSON) of each line of a validated file."""
    for line in _without_mark(lines):
        if line.strip():
            record = orjson.loads(line)
            yield record["custom_id"], orjson.dumps(record["body"]).decode()


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Some editors begin a file with a byte-order mark."""
    for number, line in enumerate(lines):
        yield line.removeprefix(BOM_UTF8) if number == 0 else line


def _line_error(
    line: bytes, endpoint: str, max_bytes: int, seen: set[str]
) -> tuple[str, str, str | None] | None:
    if len(line) > max_bytes:
        return "line_too_long", f"The line is longer than {max_bytes >> 20} MiB.", None
    try:
        check_json_size(line)
        record = orjson.loads(line)
    except ValueError:
        return "invalid_json_line", "The line is not one JSON object in UTF-8.", None
    except BadRequest as error:
        return "invalid_json_line", error.message.replace("The body", "The line"), None
    if not isinstance(record, dict):
        return "invalid_json_line", "The line is not a JSON object.", None
    name, body = record.get("custom_id"), record.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_ID or not name.isprintable():
        problem = f"custom_id must be 1 to {_LONGEST_ID} printable characters."
        return "invalid_custom_id", problem, "custom_id"
    if name in seen:
        return "duplicate_custom_id", f"custom_id {name[:80]!r} is used twice.", "custom_id"
    seen.add(name)
    if record.get("method") != "POST":
        return "invalid_method", "method must be POST.", "method"
    if record.get("url") != endpoint:
        return "mismatched_url", f"url must be {endpoint}, the endpoint of the batch.", "url"
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return "invalid_body", "body must be an object that names a model.", "body"
    if body.get("stream"):
        return "invalid_body", "stream must be false in a batch.", "body.stream"
    return None


def _file_error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}
