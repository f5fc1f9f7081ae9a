"""/v1/completions: responses and stream chunks in OpenAI's legacy format."""

from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import TollhouseError
from engine.protocol import TokenLogprob
from gateway.inference.chat.response import DONE, RunningUsage, completion_id, usage_object
from gateway.inference.completions.request import ROUTE, parse_completion
from gateway.inference.openai_errors import error_object
from gateway.inference.request import InferenceRequest, Usage
from gateway.inference.surface import ResponseInfo
from gateway.prompts.tokenizing import TextCodec
from gateway.streaming.choices import ChoiceOutput, Delta


class CompletionsSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_completion(raw)

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> "CompletionStream":
        return CompletionStream(info, request)

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        return {
            **_shell(info),
            "choices": [_choice(each, info, request) for each in choices],
            "usage": usage_object(usage),
        }

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class CompletionStream:
    def __init__(self, info: ResponseInfo, request: InferenceRequest) -> None:
        self._info = info
        self._request = request
        self._shell = orjson.dumps(_shell(info))[:-1]
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._running = RunningUsage(info.prompt_tokens) if request.continuous_usage else None
        self._offsets: dict[int, int] = {}

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if self._running is not None:
            self._tail = self._running.tail(delta)
        text, offset = delta.text, self._offsets.get(delta.choice)
        if offset is None:
            text = _echoed(self._request, self._info, delta.choice) + text
            offset = 0
        self._offsets[delta.choice] = offset + len(text)
        choice = {
            "index": delta.choice,
            "text": text,
            "logprobs": _logprobs(delta.logprobs, self._info.codec, offset)
            if self._request.logprobs is not None
            else None,
            "finish_reason": delta.finish_reason,
        }
        return b"data: " + self._shell + b',"choices":[' + orjson.dumps(choice) + b"]" + self._tail

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        if not self._request.include_usage:
            return DONE
        payload = orjson.dumps(usage_object(usage))
        return b"data: " + self._shell + b',"choices":[],"usage":' + payload + b"}\n\n" + DONE

    def failed(self, error: TollhouseError) -> bytes:
        return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"


def _shell(info: ResponseInfo) -> dict[str, Any]:
    return {
        "id": completion_id("cmpl", info),
        "object": "text_completion",
        "created": info.created,
        "model": info.model,
    }


def _choice(choice: ChoiceOutput, info: ResponseInfo, request: InferenceRequest) -> dict[str, Any]:
    delta = choice.take() or Delta(choice.index, "")
    before = _echoed(request, info, choice.index)
    return {
        "index": choice.index,
        "text": before + "".join(choice.text),
        "logprobs": _logprobs(delta.logprobs, info.codec, len(before))
        if request.logprobs is not None
        else None,
        "finish_reason": choice.finish_reason or "stop",
    }


def _echoed(request: InferenceRequest, info: ResponseInfo, choice: int) -> str:
    if not request.echo:
        return ""
    prompt = request.prompts[choice // request.n]
    if isinstance(prompt, str):
        return prompt
    return info.codec.decode(prompt) if info.codec else ""


def _logprobs(own: list[TokenLogprob], codec: TextCodec | None, offset: int) -> dict[str, Any]:
    def _text(token: int) -> str:
        return codec.token_text(token) if codec else ""

    tokens = [_text(each.token) for each in own]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in own],
        "top_logprobs": [
            {_text(token): logprob for token, logprob in (*each.top, (each.token, each.logprob))}
            for each in own
        ],
        "text_offset": offsets,
    }
