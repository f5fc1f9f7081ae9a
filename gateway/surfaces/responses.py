"""/v1/responses: responses and stream events in the format of OpenAI's Responses API, text only."""

from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import TollhouseError
from gateway.ask import Ask, Usage
from gateway.schemas.responses import ROUTE, parse_responses
from gateway.streaming.choices import ChoiceOutput, Delta
from gateway.streaming.tool_calls import ToolCall
from gateway.surface import Head
from gateway.surfaces.chat import logprobs_object
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
        choice = choices[0]
        delta = choice.take() or Delta(choice.index, "")
        text = "".join(choice.text)
        why = _INCOMPLETE.get(choice.finish_reason or "stop")
        status = "incomplete" if why else "completed"
        output = []
        if text or not choice.calls:
            logprobs = _logprobs(head, ask, delta)
            output.append(_message(_item_id(head), text, status, logprobs))
        output += [_call(each, "completed") for each in choice.calls]
        return _finished(head, ask, output, why, usage)

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class ResponseStream:
    """Events are numbered from 0 without gaps. With tools, the type of the first item is unknown until
    it arrives."""

    def __init__(self, head: Head, ask: Ask) -> None:
        self._head = head
        self._ask = ask
        self._number = 0
        self._text: list[str] | None = None  # of the open message
        self._logprobs: list[dict[str, Any]] = []  # of its tokens, when requested
        self._output: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        started = _response(self._head, self._ask, "in_progress", [])
        begun = self._event("response.created", response=started)
        begun += self._event("response.in_progress", response=started)
        return begun if self._ask.tools else begun + self._opened()

    def delta(self, delta: Delta) -> bytes:
        parts = []
        logprobs = _logprobs(self._head, self._ask, delta)
        if delta.text or logprobs:
            if self._text is None:
                parts.append(self._opened())
            assert self._text is not None
            self._text.append(delta.text)
            self._logprobs += logprobs
            told = {"delta": delta.text, "logprobs": logprobs, **self._place()}
            parts.append(self._event("response.output_text.delta", **told))
        for call in delta.calls:
            parts += [self._closed("completed"), self._called(call)]
        return b"".join(parts)

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        why = _INCOMPLETE.get(choices[0].finish_reason or "stop")
        before = b"" if self._output or self._text is not None else self._opened()
        before += self._closed("incomplete" if why else "completed")
        final = _finished(self._head, self._ask, self._output, why, usage)
        name = "response.incomplete" if why else "response.completed"
        return before + self._event(name, response=final)

    def _opened(self) -> bytes:
        self._text, self._logprobs = [], []
        item = {**_message(self._item(), "", "in_progress"), "content": []}
        return self._event(
            "response.output_item.added", output_index=len(self._output), item=item
        ) + self._event("response.content_part.added", part=_part(""), **self._place())

    def _closed(self, status: str) -> bytes:
        if self._text is None:
            return b""
        text, place, index = "".join(self._text), self._place(), len(self._output)
        item = _message(self._item(), text, status, self._logprobs)
        self._text = None
        self._output.append(item)
        return (
            self._event("response.output_text.done", text=text, logprobs=self._logprobs, **place)
            + self._event("response.content_part.done", part=item["content"][0], **place)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _called(self, call: ToolCall) -> bytes:
        item, index = _call(call, "completed"), len(self._output)
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        done = {"name": call.name, "arguments": call.arguments, **place}
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event(f"{name}.delta", delta=call.arguments, **place)
            + self._event(f"{name}.done", **done)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _item(self) -> str:
        number = len(self._output)
        return _item_id(self._head) + (f"_{number}" if number else "")

    def failed(self, error: TollhouseError) -> bytes:
        return self._event("error", code=error.code, message=str(error), param=error.param)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item(), "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _finished(
    head: Head, ask: Ask, output: list[dict[str, Any]], why: str | None, usage: Usage
) -> dict[str, Any]:
    made = _response(head, ask, "incomplete" if why else "completed", output)
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
        "text": ask.extra["text"],
        "tool_choice": ask.extra["tool_choice"],
        "tools": ask.extra["tools"],
        "top_logprobs": ask.logprobs or 0,
        "top_p": 1.0 if ask.top_p is None else ask.top_p,
        "truncation": ask.truncation,
        "metadata": ask.extra["metadata"],
    }


def _logprobs(head: Head, ask: Ask, delta: Delta) -> list[dict[str, Any]]:
    if ask.logprobs is None:
        return []
    made = logprobs_object(delta.logprobs, delta.upstream_logprobs, head.codec)
    return list(made["content"])


def _message(
    item_id: str, text: str, status: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(text, logprobs)],
    }


def _call(call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "id": call.id.replace("call_", "fc_", 1),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _item_id(head: Head) -> str:
    return f"msg_{head.request_id.rpartition('_')[2]}"
