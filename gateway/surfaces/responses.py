"""/v1/responses: answers and stream events in the shape of OpenAI's Responses API, for text."""

from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import TollhouseError
from gateway.ask import Ask, Usage
from gateway.schemas.responses import ROUTE, parse_responses
from gateway.streaming import ChoiceOutput, Delta
from gateway.surface import Head
from gateway.surfaces.openai_errors import error_object

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> Ask:
        return parse_responses(raw)

    def stream(self, head: Head, ask: Ask) -> "ResponseStream":
        return ResponseStream(head, ask)

    def answer(
        self, head: Head, ask: Ask, choices: Sequence[ChoiceOutput], usage: Usage
    ) -> dict[str, Any]:
        return _finished(head, ask, "".join(choices[0].text), choices[0].finish_reason, usage)

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class ResponseStream:
    """Events are numbered from 0 without a gap."""

    def __init__(self, head: Head, ask: Ask) -> None:
        self._head = head
        self._ask = ask
        self._item = _item_id(head)
        self._number = 0
        self._text: list[str] = []

    def begin(self) -> bytes:
        started = _response(self._head, self._ask, "in_progress", [])
        item = {**_message(self._item, "", "in_progress"), "content": []}
        return (
            self._event("response.created", response=started)
            + self._event("response.in_progress", response=started)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", part=_part(""), **self._place())
        )

    def delta(self, delta: Delta) -> bytes:
        if not delta.text:
            return b""
        self._text.append(delta.text)
        return self._event(
            "response.output_text.delta", delta=delta.text, logprobs=[], **self._place()
        )

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        text, reason = "".join(self._text), choices[0].finish_reason
        final = _finished(self._head, self._ask, text, reason, usage)
        name = "response.completed" if final["status"] == "completed" else "response.incomplete"
        return (
            self._event("response.output_text.done", text=text, logprobs=[], **self._place())
            + self._event("response.content_part.done", part=_part(text), **self._place())
            + self._event("response.output_item.done", output_index=0, item=final["output"][0])
            + self._event(name, response=final)
        )

    def failed(self, error: TollhouseError) -> bytes:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _finished(head: Head, ask: Ask, text: str, reason: str | None, usage: Usage) -> dict[str, Any]:
    why = _INCOMPLETE.get(reason or "stop")
    status = "incomplete" if why else "completed"
    made = _response(head, ask, status, [_message(_item_id(head), text, status)])
    made["incomplete_details"] = {"reason": why} if why else None
    made["usage"] = {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total,
    }
    return made


def _response(head: Head, ask: Ask, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    named = {"user": ask.end_user} if ask.end_user else {}
    return named | {
        "id": f"resp_{head.request_id.rpartition('_')[2]}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": ask.extra["instructions"],
        "max_output_tokens": ask.max_tokens,
        "model": head.model,
        "output": output,
        "parallel_tool_calls": ask.extra["parallel_tool_calls"],
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if ask.temperature is None else ask.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0 if ask.top_p is None else ask.top_p,
        "truncation": ask.truncation,
        "metadata": ask.extra["metadata"],
    }


def _message(item_id: str, text: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_id(head: Head) -> str:
    return f"msg_{head.request_id.rpartition('_')[2]}"
