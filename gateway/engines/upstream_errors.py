"""Errors of OpenAI-compatible servers, in our own words.

A server's error text may name its host or hold another tenant's data, so clients do not see it: it
goes to the log with the request's id, and clients get a fixed text with that id. Of a refusal they get
what `refusal_texts` leaves of it, where the upstream's entry or its kind allows that.
"""

import logging
import re
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Any

import orjson

from core.clock import SystemClock
from core.errors import (
    BadRequest,
    ContentBlocked,
    ContextLengthExceeded,
    PayloadTooLarge,
    TollhouseError,
    Unavailable,
)
from gateway.engines.upstream_limits import upstream_busy

log = logging.getLogger("tollhouse.upstream")
_LOGGED_CHARACTERS = 500
_REFUSALS = (400, 404, 422)
_TOO_LONG = re.compile(
    r"context[_ -](?:length|window|size|limit)|prompt(?: is)?[_ ]too[_ ]long"
    r"|maximum (?:model|sequence) length|`?max_new_tokens`? must be",
    re.IGNORECASE,
)
# The counts, as OpenAI, vLLM, SGLang, llama.cpp, TGI and Anthropic write them.
_LIMIT = re.compile(
    r"context (?:length|size|window|limit)(?: is| of|:)?\s*\(?(?:only )?(\d+)\b(?! \+)"
    r"|\"n_ctx\":\s*(\d+)|tokens > (\d+) maximum|\d+ \+ \d+ > (\d+)|context is (\d+)"
    r"|must be <= (\d+)",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    r"(\d+) (?:tokens )?in (?:the|your) (?:messages|prompt|input)|\"n_prompt_tokens\":\s*(\d+)"
    r"|prompt (?:contains|has)(?: at least)? (\d+)|too long: (\d+) tokens|has (\d+) input tokens"
    r"|(\d+) \+ \d+ > \d+|(\d+) `?inputs`? tokens|input \((\d+) tokens\)",
    re.IGNORECASE,
)
_OUTPUT = re.compile(
    r"(\d+) (?:tokens )?(?:in|for) the completion|requested (\d+) output|\d+ \+ (\d+) > \d+"
    r"|(\d+) `?max_new_tokens|max_(?:output_)?tokens is (\d+)|tokens' is too large: (\d+)",
    re.IGNORECASE,
)
_TOTAL = re.compile(r"(?:requested|resulted in) (?:about )?(\d+) tokens", re.IGNORECASE)
_POLICY = re.compile(r"content[_ -](?:filter|policy|management)|moderation|safety", re.IGNORECASE)


def error_of_status(
    engine_id: str,
    request_id: str,
    status: int,
    body: bytes,
    retry_after: str = "",
    shown: Callable[[Any], str] | None = None,
) -> TollhouseError:
    """The error of an answer with an error status; `retry_after` is its header. `shown` makes the
    text for the client from the server's; without it, the client gets ours alone."""
    try:
        answer = orjson.loads(body)
        detail = answer.get("error", answer) if isinstance(answer, dict) else answer
    except ValueError:
        detail = body.decode("utf-8", "replace")
    asked_s = wait_s(retry_after, SystemClock().now())
    error = _error(engine_id, request_id, status, detail, asked_s)
    if shown is not None and error.code == "upstream_refused" and (text := shown(detail)):
        error.message = f"The upstream of this model refused the request: {text}"
    return error


def error_of_event(engine_id: str, request_id: str, detail: Any) -> TollhouseError:
    """The error of an `error` event in a stream."""
    code = detail.get("code") if isinstance(detail, dict) else None
    numeric = type(code) is int or (isinstance(code, str) and re.fullmatch(r"[45]\d\d", code))
    return _error(engine_id, request_id, int(code) if numeric else 500, detail, None)  # type: ignore[arg-type]


def error_of_reported(engine_id: str, request_id: str, status: int, detail: Any) -> TollhouseError:
    """The error that a provider reports inside of an answer, with the status that it stands for."""
    return _error(engine_id, request_id, status, detail, None)


def _error(
    engine_id: str, request_id: str, status: int, detail: Any, retry_after_s: float | None
) -> TollhouseError:
    text = detail if isinstance(detail, str) else orjson.dumps(detail).decode()
    log.warning(
        "%s answered %s with %d: %s", engine_id, request_id, status, text[:_LOGGED_CHARACTERS]
    )
    where = f"The operator finds the reason in the log under {request_id}."
    if status == 429:
        return upstream_busy("it answered 429", retry_after_s or 1.0)
    # A server that fails on a tenant's prompt may say so with any status, so the words decide.
    if status != 401 and _TOO_LONG.search(text):
        return ContextLengthExceeded(
            "The prompt and max_tokens exceed the context of this model's upstream.",
            next_step=f"Shorten the prompt or max_tokens. {where}",
        ).counted(*_counts_of(text))
    if status in (400, 403, 422, 500) and _POLICY.search(text):
        return ContentBlocked(
            "The upstream of this model refused the request under its content policy.",
            next_step=f"Change the prompt. {where}",
        )
    if status == 413:
        return PayloadTooLarge(
            "The request is larger than this model's upstream accepts.",
            next_step=f"Send less. {where}",
        )
    if status in _REFUSALS:
        return BadRequest(
            f"The upstream of this model refused the request with status {status}.",
            next_step=f"Check the request's parameters. {where}",
            code="upstream_refused",
        )
    return Unavailable(
        f"The upstream of this model failed with status {status}.",
        next_step=f"Try again. {where}",
        code="engine_failed",
        retry_after_s=retry_after_s or 1.0,
    )


def _counts_of(text: str) -> tuple[int | None, int | None, int | None]:
    """(prompt, requested output, context) in a server's refusal, of what it says."""
    found = [_PROMPT.search(text), _OUTPUT.search(text), _LIMIT.search(text)]
    prompt, output, limit = [_number(each) for each in found]
    total = _number(_TOTAL.search(text))
    if prompt is None and total is not None:
        prompt = total - (output or 0)
    return prompt, output, limit


def _number(found: re.Match[str] | None) -> int | None:
    return int(next(each for each in found.groups() if each)) if found is not None else None


def wait_s(retry_after: str, now: datetime) -> float | None:
    """Seconds or a date, as HTTP has it; None for anything else."""
    if retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6:
        return float(retry_after)
    try:
        return max(1.0, ceil((parsedate_to_datetime(retry_after) - now).total_seconds()))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
