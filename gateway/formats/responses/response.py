"""/v1/responses: responses and stream events in the format of OpenAI's Responses API, text only."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from core.errors import TollhouseError
from gateway.answers.choices import ChoiceOutput, Delta
from gateway.answers.surface import ResponseInfo
from gateway.answers.tool_calls import ToolCall
from gateway.edge.api_errors import error_object
from gateway.formats.chat.response import logprobs_object
from gateway.formats.responses.request import ROUTE, parse_responses
from gateway.request.inference import InferenceRequest, Usage
from gateway.request.thoughts import OPENAI, pack

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Codes of errors that clients act on; any other failure is `server_error`.
_FAILURES = frozenset(
    ("rate_limit_exceeded", "insufficient_quota", "context_length_exceeded", "content_filter")
)


class ResponsesSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_responses(raw)

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> "ResponseStream":
        return ResponseStream(info, request)

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        choice = choices[0]
        delta = choice.take() or Delta(choice.index, "")
        sealed = sealed_of(choice.details) if request.extra.get("encrypted_reasoning") else None
        text = "".join(choice.text)
        incomplete_reason = _INCOMPLETE.get(choice.finish_reason or "stop")
        status = "incomplete" if incomplete_reason else "completed"
        output = []
        if choice.reasoning or sealed:
            output.append(_sealed(_reasoning(info, "".join(choice.reasoning)), sealed))
        if text or not choice.calls:
            logprobs = _logprobs(info, request, delta)
            part = _refusal(text) if choice.refused else _part(text, logprobs)
            if choice.annotations:
                part["annotations"] = annotations_of(choice.annotations)
            output.append(_message(_item_id(info), status, part))
        output += [_call(each, "completed", request) for each in choice.calls]
        return _finished(info, request, output, incomplete_reason, usage)

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class ResponseStream:
    """Events are numbered from 0 without gaps. The type of the first item is unknown until it
    arrives."""

    def __init__(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        on_finished: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._on_finished = on_finished
        self._info = info
        self._request = request
        self._number = 0
        self._text: list[str] | None = None  # of the open message
        self._thought: list[str] | None = None  # of the open reasoning item
        self._refused = False  # whether the open message is a refusal
        self._seals = bool(request.extra.get("encrypted_reasoning"))
        self._details: list[dict[str, Any]] = []  # of the open reasoning item
        self._annotations: list[dict[str, Any]] = []  # of the open message
        self._logprobs: list[dict[str, Any]] = []  # of its tokens, when requested
        self._output: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        started = response_object(self._info, self._request, "in_progress", [])
        begun = self._event("response.created", response=started)
        begun += self._event("response.in_progress", response=started)
        return begun

    def delta(self, delta: Delta) -> bytes:
        parts = []
        logprobs = _logprobs(self._info, self._request, delta)
        if delta.reasoning:
            parts.append(self._reason(delta.reasoning))
            logprobs = logprobs if delta.text else []
        if delta.details and self._seals:
            parts.append(self._reason(""))  # which opens an item for them
            self._details += delta.details
        if delta.text or logprobs:
            parts.append(self._close_reasoning())
            if self._text is None:
                parts.append(self._open_message(refused=delta.refused))
            assert self._text is not None
            self._text.append(delta.text)
            self._logprobs += logprobs
            payload = {"delta": delta.text, **self._position()}
            if self._refused:
                parts.append(self._event("response.refusal.delta", **payload))
            else:
                payload["logprobs"] = logprobs
                parts.append(self._event("response.output_text.delta", **payload))
        if delta.annotations and self._text is not None:
            for each in annotations_of(delta.annotations):
                place = {"annotation_index": len(self._annotations), **self._position()}
                self._annotations.append(each)
                name = "response.output_text.annotation.added"
                parts.append(self._event(name, annotation=each, **place))
        for call in delta.calls:
            parts.append(self._close_reasoning())
            parts += [self._close_message("completed"), self._add_function_call(call)]
        return b"".join(parts)

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        incomplete_reason = _INCOMPLETE.get(choices[0].finish_reason or "stop")
        before = self._close_reasoning()
        if not self._output and self._text is None:
            before += self._open_message()
        before += self._close_message("incomplete" if incomplete_reason else "completed")
        final = _finished(self._info, self._request, self._output, incomplete_reason, usage)
        if self._on_finished is not None:
            self._on_finished(final)
        name = "response.incomplete" if incomplete_reason else "response.completed"
        return before + self._event(name, response=final)

    def _reason(self, text: str) -> bytes:
        begun = b""
        if self._thought is None:
            begun, self._thought = self._close_message("completed"), []
            item = {**_reasoning(self._info, "", len(self._output)), "content": []}
            begun += self._event(
                "response.output_item.added",
                output_index=len(self._output),
                item={**item, "status": "in_progress"},
            ) + self._event(
                "response.content_part.added", part=_thought(""), **self._thought_position()
            )
        if not text:
            return begun
        self._thought.append(text)
        return begun + self._event(
            "response.reasoning_text.delta", delta=text, **self._thought_position()
        )

    def _close_reasoning(self) -> bytes:
        if self._thought is None:
            return b""
        text, position, index = "".join(self._thought), self._thought_position(), len(self._output)
        item = _sealed(_reasoning(self._info, text, index), sealed_of(self._details))
        self._thought, self._details = None, []
        self._output.append(item)
        return (
            self._event("response.reasoning_text.done", text=text, **position)
            + self._event("response.content_part.done", part=_thought(text), **position)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _thought_position(self) -> dict[str, Any]:
        index = len(self._output)
        item = _reasoning(self._info, "", index)["id"]
        return {"item_id": item, "output_index": index, "content_index": 0}

    def _open_message(self, *, refused: bool = False) -> bytes:
        self._text, self._logprobs, self._refused = [], [], refused
        self._annotations = []
        part = _refusal("") if refused else _part("")
        item = {**_message(self._item(), "in_progress", part), "content": []}
        return self._event(
            "response.output_item.added", output_index=len(self._output), item=item
        ) + self._event("response.content_part.added", part=part, **self._position())

    def _close_message(self, status: str) -> bytes:
        if self._text is None:
            return b""
        text, position, index = "".join(self._text), self._position(), len(self._output)
        part = _refusal(text) if self._refused else _part(text, self._logprobs)
        if self._annotations:
            part["annotations"] = self._annotations
        item = _message(self._item(), status, part)
        self._text = None
        self._output.append(item)
        if self._refused:
            done = self._event("response.refusal.done", refusal=text, **position)
        else:
            done = self._event(
                "response.output_text.done", text=text, logprobs=self._logprobs, **position
            )
        return (
            done
            + self._event("response.content_part.done", part=item["content"][0], **position)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _add_function_call(self, call: ToolCall) -> bytes:
        item, index = _call(call, "completed", self._request), len(self._output)
        self._output.append(item)
        position = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        done = {"name": item["name"], "arguments": call.arguments, **position}
        return (
            self._event("response.output_item.added", output_index=index, item=begun)
            + self._event(f"{name}.delta", delta=call.arguments, **position)
            + self._event(f"{name}.done", **done)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _item(self) -> str:
        number = len(self._output)
        return _item_id(self._info) + (f"_{number}" if number else "")

    def failed(self, error: TollhouseError) -> bytes:
        before = b"" if self._number else self.begin()
        before += self._close_reasoning() + self._close_message("incomplete")
        final = response_object(self._info, self._request, "failed", self._output)
        code = error.code if error.code in _FAILURES else "server_error"
        final["error"] = {"code": code, "message": str(error)}
        final["usage"] = None
        if self._on_finished is not None:
            self._on_finished(final)
        return before + self._event("response.failed", response=final)

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._item(), "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"


def _finished(
    info: ResponseInfo,
    request: InferenceRequest,
    output: list[dict[str, Any]],
    incomplete_reason: str | None,
    usage: Usage,
) -> dict[str, Any]:
    result = response_object(
        info, request, "incomplete" if incomplete_reason else "completed", output
    )
    result["incomplete_details"] = {"reason": incomplete_reason} if incomplete_reason else None
    result["usage"] = usage_object(usage)
    return result


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.cache_write + usage.cache_write_long,
        },
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }


def response_object(
    info: ResponseInfo, request: InferenceRequest, status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    labels: dict[str, Any] = request.extra["labels"]
    return labels | {
        "id": f"resp_{info.request_id.rpartition('_')[2]}",
        "object": "response",
        "created_at": info.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.extra["instructions"],
        "max_output_tokens": request.max_tokens,
        "model": info.model,
        "output": output,
        "parallel_tool_calls": request.extra["parallel_tool_calls"],
        "previous_response_id": None,
        "prompt": request.extra.get("prompt"),
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "service_tier": request.service_tier or "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": request.extra["text"],
        "tool_choice": request.extra["tool_choice"],
        "tools": request.extra["tools"],
        "top_logprobs": request.logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation,
        "metadata": request.extra["metadata"],
        **request.extra.get("fields", {}),
    }


def _logprobs(info: ResponseInfo, request: InferenceRequest, delta: Delta) -> list[dict[str, Any]]:
    if request.logprobs is None:
        return []
    result = logprobs_object(delta.logprobs, delta.upstream_logprobs, info.codec)
    return list(result["content"])


def _message(item_id: str, status: str, part: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _reasoning(info: ResponseInfo, text: str, index: int = 0) -> dict[str, Any]:
    return {
        "id": f"rs_{info.request_id.rpartition('_')[2]}" + (f"_{index}" if index else ""),
        "type": "reasoning",
        "summary": [],
        "content": [_thought(text)],
        "status": "completed",
    }


def sealed_of(details: list[dict[str, Any]]) -> str | None:
    """`encrypted_content`: OpenAI's own as it is, another provider's packed."""
    if not details:
        return None
    if len(details) == 1 and details[0].get("format") == OPENAI and "data" in details[0]:
        return str(details[0]["data"])
    return pack(details)


def _sealed(item: dict[str, Any], sealed: str | None) -> dict[str, Any]:
    return item if sealed is None else {**item, "encrypted_content": sealed}


def annotations_of(annotations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat's citations as those of a response, whose fields lie flat."""
    return [
        {"type": each["type"], **each["url_citation"]} if "url_citation" in each else each
        for each in annotations
    ]


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _call(call: ToolCall, status: str, request: InferenceRequest) -> dict[str, Any]:
    namespace, name = request.extra["namespaces"].get(call.name, (None, call.name))
    named = {"namespace": namespace} if namespace is not None else {}
    return named | {
        "id": call.id.replace("call_", "fc_", 1),
        "type": "function_call",
        "call_id": call.id,
        "name": name,
        "arguments": call.arguments,
        "status": status,
    }


def _part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _refusal(text: str) -> dict[str, Any]:
    return {"type": "refusal", "refusal": text}


def _item_id(info: ResponseInfo) -> str:
    return f"msg_{info.request_id.rpartition('_')[2]}"
