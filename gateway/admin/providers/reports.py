"""Usage reports that providers export, read into tokens by day, model and key.

OpenAI's are pages of `/v1/organization/usage/completions`, whose input includes what a cache held;
Anthropic's are pages of `/v1/organizations/usage_report/messages`, whose input does not. A file is one
page, a list of pages, or a page a line.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, date, datetime
from typing import Any

from core.errors import BadRequest

FIELDS = ("requests", "input", "cache_read", "cache_write", "output")
_MOST = 10**15


@dataclass(frozen=True, slots=True)
class Counted:
    """Of one day, model and key. `input` is what no cache held and none was given; None: not reported."""

    requests: int | None = 0
    input: int = 0
    cache_read: int = 0
    cache_write: int = 0
    output: int = 0

    def plus(self, other: "Counted") -> "Counted":
        pairs = zip(astuple(self), astuple(other), strict=True)
        summed: list[Any] = [None if a is None or b is None else a + b for a, b in pairs]
        return Counted(*summed)


Place = tuple[date, str, str]  # day, model, key; the key is empty where the report has none


def parse(text: str) -> dict[Place, Counted]:
    """BadRequest names what cannot be read."""
    found: dict[Place, Counted] = {}
    for page in _pages(text):
        if page.get("has_more") is True and not page.get("next_page"):
            raise _refused("a page says that more follows, and names no next page")
        buckets = page.get("data")
        if not isinstance(buckets, list):
            raise _refused("a page has no data")
        for at, bucket in enumerate(buckets):
            try:
                for place, counted in _of_bucket(bucket):
                    known = found.get(place)
                    found[place] = counted if known is None else known.plus(counted)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise _refused(f"data[{at}] cannot be read ({error!r})") from None
    if not found:
        raise _refused("it has no usage of a model")
    return found


def _pages(text: str) -> Iterator[Mapping[str, Any]]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        try:
            given = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise _refused(f"it is not JSON: {error}") from None
    for page in given if isinstance(given, list) else [given]:
        if not isinstance(page, dict):
            raise _refused("it is not a page of a report, nor a list of them")
        yield page


def _of_bucket(bucket: Mapping[str, Any]) -> Iterator[tuple[Place, Counted]]:
    if "start_time" in bucket:
        day = datetime.fromtimestamp(int(bucket["start_time"]), UTC).date()
    else:
        start = datetime.fromisoformat(bucket["starting_at"])
        day = (start if start.tzinfo else start.replace(tzinfo=UTC)).astimezone(UTC).date()
    for row in bucket["results"]:
        model, key = row["model"], row.get("api_key_id")
        if not isinstance(model, str) or not model:
            raise ValueError("group the report by model")
        yield (day, model, str(key or "")), _counted(row)


def _counted(row: Mapping[str, Any]) -> Counted:
    if "uncached_input_tokens" in row:
        written = row.get("cache_creation") or {}
        return Counted(
            None,  # Anthropic's reports have none
            _count(row, "uncached_input_tokens"),
            _count(row, "cache_read_input_tokens"),
            sum(_count(written, name) for name in written),
            _count(row, "output_tokens"),
        )
    cached = _count(row, "input_cached_tokens")
    whole = _count(row, "input_tokens")
    if cached > whole:
        raise ValueError("more input is cached than there is")
    requests = _count(row, "num_model_requests")
    return Counted(requests, whole - cached, cached, 0, _count(row, "output_tokens"))


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name) or 0
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is {value!r}")
    return value


def _refused(problem: str) -> BadRequest:
    return BadRequest(
        f"The usage report cannot be read: {problem}.",
        next_step="Export it by day, grouped by model (and api_key_id), from OpenAI's "
        "/v1/organization/usage/completions or Anthropic's /v1/organizations/usage_report/messages.",
        param="file",
    )
