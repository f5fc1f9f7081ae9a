"""OpenAI's format of the usage and costs APIs, for compatibility with its finance scripts.

Field names and defaults follow OpenAI's OpenAPI document (/organization/usage/completions and
/organization/costs). `amount.value` is a JSON number there; it is written from exact decimals.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from billing.periods import zone_of
from billing.usage.label_buckets import PREFIX
from billing.usage.usage_buckets import Bucket, BucketPage, BucketQuery, BucketRow, Width
from core.clock import usual
from core.errors import BadRequest
from core.labels import check_label
from core.money import decimal_of

WIDTHS = {width.label: width for width in Width}
# OpenAI's name of each dimension, and ours.
USAGE_GROUPS = {
    "project_id": "project_id",
    "user_id": "member_id",
    "api_key_id": "key_id",
    "model": "model",
    "adapter": "adapter",
    "batch": "batch",
}
COST_GROUPS = {"project_id": "project_id", "api_key_id": "key_id", "line_item": "line_item"}
# Dimensions of OpenAI's API that we do not record: accepted, and null in every result.
_UNUSED_GROUPS = ("service_tier",)
_LINE_ITEMS = (  # name, amount, quantity, unit
    ("input", "input_amount", "uncached_tokens", "tokens"),
    ("cached input", "cached_amount", "cached_tokens", "tokens"),
    ("output", "output_amount", "output_tokens", "tokens"),
    ("waived", "waived_amount", "waived_tokens", "tokens"),
    ("requests", "request_amount", "requests", None),
    ("adapter requests", "adapter_amount", "adapter_requests", None),
    ("GPU seconds", "gpu_amount", "gpu_seconds", "duration_seconds"),
    ("moderation calls", "moderation_amount", "moderation_calls", None),
    ("audio seconds", "audio_amount", "audio_seconds", "duration_seconds"),
    ("images", "image_amount", "images", "images"),
    ("spoken characters", "character_amount", "characters", "characters"),
    ("cache writes", "cache_write_5m_amount", "cache_write_5m_tokens", "tokens"),
    ("cache writes for an hour", "cache_write_1h_amount", "cache_write_1h_tokens", "tokens"),
    ("audio input", "audio_input_amount", "audio_input_tokens", "tokens"),
    ("image input", "image_input_amount", "image_input_tokens", "tokens"),
    ("reasoning", "reasoning_amount", "reasoning_tokens", "tokens"),
    ("audio output", "audio_output_amount", "audio_output_tokens", "tokens"),
    ("image output", "image_output_amount", "image_output_tokens", "tokens"),
    ("searches", "search_amount", "searches", None),
    ("tool calls", "tool_call_amount", "tool_calls", None),
)

_PARTS = tuple(
    (total, f"{part}_tokens", f"{part}_amount")
    for total, parts in (
        ("uncached_tokens", ("cache_write_5m", "cache_write_1h", "audio_input", "image_input")),
        ("output_tokens", ("reasoning", "audio_output", "image_output")),
    )
    for part in parts
)


PARAMETERS = (
    *("start_time", "end_time", "bucket_width", "time_zone"),
    *("group_by", "limit", "page", "batch"),
    *("project_ids", "api_key_ids", "user_ids", "models", "labels"),
)


def query_parameters(groups: dict[str, str], widths: Iterable[str]) -> list[dict[str, Any]]:
    """The parameters as the OpenAPI document lists them. They are read from the query itself, in the
    spellings of several clients."""
    texts = {"type": "array", "items": {"type": "string"}}
    second = {"type": "integer", "minimum": 0}
    by: list[dict[str, Any]] = [
        {"type": "string", "enum": [*groups, *_UNUSED_GROUPS]},
        {"type": "string", "pattern": f"^{PREFIX}.+", "examples": ["label:team"]},
    ]
    schemas: dict[str, tuple[dict[str, Any], str]] = {
        "start_time": (second, "Unix time in seconds, inclusive."),
        "end_time": (second, "Unix time in seconds, exclusive; now without it."),
        "bucket_width": ({"type": "string", "enum": list(widths)}, "1d without it."),
        "time_zone": (
            {"type": "string"},
            "An IANA name, such as Asia/Kolkata: buckets of 1d are its days. UTC without it.",
        ),
        "group_by": (texts | {"items": {"anyOf": by}}, "One result a group."),
        "labels": (
            {"type": "array", "items": {"type": "string", "examples": ["team=search"]}},
            "Only requests with one of these labels of each name.",
        ),
        "project_ids": (texts, "Only of these projects."),
        "user_ids": (texts, "Only of keys of these members."),
        "api_key_ids": (texts, "Only of these keys."),
        "models": (texts, "Only of these models."),
        "batch": ({"type": "boolean"}, "Only of batches, or of other requests."),
        "limit": ({"type": "integer", "minimum": 1}, "Buckets of a page."),
        "page": ({"type": "string"}, "`next_page` of the page before."),
    }
    return [
        {
            "name": name,
            "in": "query",
            "required": name == "start_time",
            "description": told,
            "schema": schema,
        }
        for name, (schema, told) in schemas.items()
    ]


def usage_query(
    parameters: dict[str, list[str]], now: datetime, known: dict[str, str] = USAGE_GROUPS
) -> tuple[BucketQuery, list[str]]:
    """(query, requested groups by OpenAI's names)."""
    groups = _groups(parameters, known)
    ours = tuple(_ours(name, known) for name in groups if name not in _UNUSED_GROUPS)
    return _query(parameters, now, ours), groups


def costs_query(parameters: dict[str, list[str]], now: datetime) -> tuple[BucketQuery, list[str]]:
    groups = _groups(parameters, COST_GROUPS)
    width = _one(parameters, "bucket_width") or "1d"
    if width != "1d":
        raise BadRequest(f"bucket_width is {width!r}; costs support 1d only.", param="bucket_width")
    kept = [name for name in groups if name not in (*_UNUSED_GROUPS, "line_item")]
    ours = [_ours(name, COST_GROUPS) for name in kept]
    if "line_item" in groups:
        ours.append("model")
    return _query(parameters, now, (*ours, "currency")), groups


def usage_page(page: BucketPage, groups: list[str]) -> dict[str, Any]:
    return page_of(page, lambda row: [_usage_result(row, groups)])


def costs_page(page: BucketPage, groups: list[str]) -> dict[str, Any]:
    if "line_item" in groups:
        return page_of(page, lambda row: _line_item_results(row, groups))
    return page_of(page, lambda row: [_cost_result(row, groups, row.amounts["amount"])])


def page_of(page: BucketPage, results: Any) -> dict[str, Any]:
    return {
        "object": "page",
        "data": [_bucket(bucket, results) for bucket in page.buckets],
        "has_more": page.next_start is not None,
        "next_page": f"page_{int(page.next_start.timestamp())}" if page.next_start else None,
    }


def _bucket(bucket: Bucket, results: Any) -> dict[str, Any]:
    return {
        "object": "bucket",
        "start_time": int(bucket.start.timestamp()),
        "end_time": int(bucket.end.timestamp()),
        "results": [result for row in bucket.rows for result in results(row)],
    }


def _usage_result(row: BucketRow, groups: list[str]) -> dict[str, Any]:
    counts = row.counts
    written = counts["cache_write_5m_tokens"] + counts["cache_write_1h_tokens"]
    uncached = counts["input_tokens"] - counts["cached_tokens"] - written
    audio, images = counts["audio_input_tokens"], counts["image_input_tokens"]
    spoken, drawn = counts["audio_output_tokens"], counts["image_output_tokens"]
    named = {
        name: row.group.get(ours) or None
        for name, ours in USAGE_GROUPS.items()
        if name not in ("adapter", "batch")
    }
    result = {
        "object": "organization.usage.completions.result",
        "input_tokens": counts["input_tokens"],
        "input_cached_tokens": counts["cached_tokens"],
        "input_cache_write_tokens": written,
        "input_uncached_tokens": uncached,
        "output_tokens": counts["output_tokens"],
        "input_text_tokens": uncached - audio - images,
        "output_text_tokens": counts["output_tokens"] - spoken - drawn,
        "input_cached_text_tokens": counts["cached_tokens"],
        "input_audio_tokens": audio,
        "input_cached_audio_tokens": 0,
        "output_audio_tokens": spoken,
        "input_image_tokens": images,
        "input_cached_image_tokens": 0,
        "output_image_tokens": drawn,
        "num_model_requests": counts["requests"],
        **named,
        "batch": bool(row.group["batch"]) if "batch" in groups else None,
        "service_tier": None,
        **labels_of(row),
    }
    if "adapter" in groups:
        result["adapter"] = row.group.get("adapter") or None
    return result


def _cost_result(row: BucketRow, groups: list[str], units: int, **more: Any) -> dict[str, Any]:
    return {
        "object": "organization.costs.result",
        "amount": {
            "value": Decimal(decimal_of(units)),
            "currency": (row.group["currency"] or "USD").lower(),
        },
        "line_item": None,
        "quantity": None,
        "quantity_unit": None,
        "project_id": row.group.get("project_id"),
        "api_key_id": row.group.get("key_id"),
        **labels_of(row),
        **more,
    }


def _line_item_results(row: BucketRow, groups: list[str]) -> list[dict[str, Any]]:
    counts = row.counts | {
        "uncached_tokens": row.counts["input_tokens"] - row.counts["cached_tokens"]
    }
    # What has a price of its own is no part of the line of its total.
    for total, part, amount in _PARTS:
        if row.amounts[amount]:
            counts[total] -= counts[part]
        else:
            counts[part] = 0
    return [
        _cost_result(
            row,
            groups,
            row.amounts[amount],
            line_item=f"{row.group['model']}, {name}",
            quantity=counts[quantity],
            quantity_unit=unit,
        )
        for name, amount, quantity, unit in _LINE_ITEMS
        if row.amounts[amount] or counts[quantity]
    ]


def _query(
    parameters: dict[str, list[str]], now: datetime, group_by: tuple[str, ...]
) -> BucketQuery:
    label = _one(parameters, "bucket_width") or "1d"
    if label not in WIDTHS:
        raise BadRequest(
            f"bucket_width is {label!r}; supported: {', '.join(WIDTHS)}.", param="bucket_width"
        )
    start = _time(parameters, "start_time")
    if start is None:
        raise BadRequest(
            "start_time is missing; it takes a Unix time in seconds.", param="start_time"
        )
    page = _one(parameters, "page")
    if page is not None:
        start = _cursor(page)
    limit = _whole(parameters, "limit")
    return BucketQuery(
        start,
        _time(parameters, "end_time") or now,
        WIDTHS[label],
        group_by,
        limit,
        zone=checked_zone(_one(parameters, "time_zone") or "UTC"),
        project_ids=_many(parameters, "project_ids"),
        key_ids=_many(parameters, "api_key_ids"),
        models=_many(parameters, "models"),
        member_ids=_many(parameters, "user_ids"),
        batch=_truth(parameters, "batch"),
    )


def checked_zone(name: str) -> str:
    try:
        zone_of(name)
    except BadRequest as error:
        raise BadRequest(error.message, next_step=error.next_step, param="time_zone") from None
    return name


def _groups(parameters: dict[str, list[str]], known: dict[str, str]) -> list[str]:
    requested = list(dict.fromkeys(_many(parameters, "group_by")))
    for name in requested:
        if name not in known and name not in _UNUSED_GROUPS and not _is_label(name):
            raise BadRequest(
                f"group_by is {name[:40]!r}; supported: {', '.join(known)}, and label:<name>.",
                param="group_by",
            )
    return requested


def labels_asked(parameters: dict[str, list[str]]) -> tuple[str, ...]:
    return tuple(check_label(each, "labels") for each in _many(parameters, "labels"))


def _is_label(name: str) -> bool:
    return name.startswith(PREFIX) and bool(name.removeprefix(PREFIX))


def _ours(name: str, known: dict[str, str]) -> str:
    return name if _is_label(name) else known[name]


def labels_of(row: BucketRow) -> dict[str, Any]:
    """The values by name, of a result that is grouped by labels."""
    found = {
        name.removeprefix(PREFIX): value
        for name, value in row.group.items()
        if name.startswith(PREFIX)
    }
    return {"labels": found} if found else {}


def _many(parameters: dict[str, list[str]], name: str) -> tuple[str, ...]:
    """Accepts the spellings of common clients: `a=1&a=2`, `a[]=1` and `a=1,2`."""
    values = [*parameters.get(name, []), *parameters.get(f"{name}[]", [])]
    return tuple(part for value in values for part in value.split(",") if part)


def _one(parameters: dict[str, list[str]], name: str) -> str | None:
    values = parameters.get(name, [])
    if len(values) > 1:
        raise BadRequest(f"{name} is given {len(values)} times; give it once.", param=name)
    return values[0] if values else None


def _whole(parameters: dict[str, list[str]], name: str) -> int | None:
    text = _one(parameters, name)
    if text is None:
        return None
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
        raise BadRequest(f"{name} is {text[:40]!r}, which is not an integer.", param=name)
    return int(text)


def _truth(parameters: dict[str, list[str]], name: str) -> bool | None:
    text = _one(parameters, name)
    if text is not None and text not in ("true", "false"):
        raise BadRequest(f"{name} is {text[:40]!r}; it must be true or false.", param=name)
    return None if text is None else text == "true"


def _time(parameters: dict[str, list[str]], name: str) -> datetime | None:
    seconds = _whole(parameters, name)
    return None if seconds is None else _datetime(seconds, name)


def _cursor(page: str) -> datetime:
    seconds = page.removeprefix("page_")
    if (
        not page.startswith("page_")
        or not (seconds.isascii() and seconds.isdecimal())
        or len(seconds) > 12
    ):
        raise BadRequest("page is not a next_page cursor of an earlier response.", param="page")
    return _datetime(int(seconds), "page")


def _datetime(seconds: int, name: str) -> datetime:
    try:
        return usual(datetime.fromtimestamp(seconds, UTC))
    except (OverflowError, ValueError, OSError):
        raise BadRequest(
            f"{name} is {seconds}, which is not a valid Unix time in seconds.", param=name
        ) from None
