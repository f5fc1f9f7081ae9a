"""/v1/completions: responses and stream chunks in OpenAI's legacy format."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import orjson

from core.errors import TollhouseError
from engine.protocol import PromptLogprob, TokenLogprob
from gateway.answers.choices import ChoiceOutput, Delta
from gateway.answers.surface import ResponseInfo
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.edge.api_errors import error_object
from gateway.formats.chat.response import (
    DONE,
    RunningUsage,
    completion_id,
    shown_logprob,
    token_ids,
    token_name,
    usage_object,
)
from gateway.formats.completions.request import ROUTE, parse_completion
from gateway.formats.prompt_logprobs import prompt_logprobs_object
from gateway.request.inference import InferenceRequest, Usage


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
            "choices": [
                _choice(each, info, request, choices[each.index - each.index % request.n])
                for each in choices
            ],
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
        begins = offset is None
        if offset is None:
            text = _echoed(self._request, self._info, delta.choice) + text
            offset = 0
        self._offsets[delta.choice] = offset + len(text)
        choice = {
            "index": delta.choice,
            "text": text,
            "logprobs": _logprobs(delta.logprobs, self._info.codec, offset, self._request)
            if self._request.logprobs is not None
            else None,
            "finish_reason": delta.finish_reason,
        }
        if self._request.return_token_ids:
            if begins:
                prompt = delta.choice // self._request.n
                choice["prompt_token_ids"] = self._info.prompts[prompt]
            choice["token_ids"] = token_ids(delta)
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


def _choice(
    choice: ChoiceOutput, info: ResponseInfo, request: InferenceRequest, first: ChoiceOutput
) -> dict[str, Any]:
    """first: of the same prompt."""
    delta = choice.take() or Delta(choice.index, "")
    before = _echoed(request, info, choice.index)
    logprobs = None
    if request.logprobs is not None:
        logprobs = _logprobs(delta.logprobs, info.codec, len(before), request)
        if request.echo:
            of_prompt = _echoed_logprobs(first.prompt_logprobs, before, info.codec, request)
            logprobs = {name: of_prompt[name] + logprobs[name] for name in logprobs}
    wanted = request.extra.get("prompt_logprobs")
    scores = None
    if wanted is not None:
        scores = prompt_logprobs_object(first.prompt_logprobs, wanted, info.codec)
    ids = request.return_token_ids
    return {
        "index": choice.index,
        "text": before + "".join(choice.text),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason or "stop",
        # vLLM's fields, null where they are not asked for.
        "prompt_logprobs": scores,
        "prompt_token_ids": info.prompts[choice.index // request.n] if ids else None,
        "token_ids": token_ids(delta) if ids else None,
    }


def _echoed(request: InferenceRequest, info: ResponseInfo, choice: int) -> str:
    if not request.echo:
        return ""
    prompt = request.prompts[choice // request.n]
    if isinstance(prompt, str):
        return prompt
    return info.codec.decode(prompt, special=True) if info.codec else ""


def _echoed_logprobs(
    scores: list[PromptLogprob], before: str, codec: TextCodec | None, request: InferenceRequest
) -> dict[str, Any]:
    """The prompt's part of the object: the first token has no log-probability."""
    texts = [codec.token_text(each.token) if codec else "" for each in scores]
    sizes = [len(text) for text in texts]
    # Tokens that the text does not show, such as one that begins every prompt, come before it.
    start = len(before) - sum(sizes)
    ends = list(accumulate(sizes, initial=start))
    tops: list[dict[str, float] | None] = []
    for each in scores:
        listed = None if each.logprob is None else _top(each, each.logprob, codec, request)
        tops.append(listed)
    return {
        "tokens": [
            token_name(each.token, codec, request.return_tokens_as_token_ids) for each in scores
        ],
        "token_logprobs": [each.logprob for each in scores],
        "top_logprobs": tops,
        "text_offset": [max(0, each) for each in ends[:-1]],
    }


def _top(
    score: PromptLogprob, logprob: float, codec: TextCodec | None, request: InferenceRequest
) -> dict[str, float]:
    """The prompt's own token comes first."""
    listed = ((score.token, logprob), *score.top[: request.logprobs])
    as_ids = request.return_tokens_as_token_ids
    return {token_name(token, codec, as_ids): value for token, value in listed}


def _logprobs(
    own: list[TokenLogprob], codec: TextCodec | None, offset: int, request: InferenceRequest
) -> dict[str, Any]:
    as_ids = request.return_tokens_as_token_ids
    sizes = [len(token_name(each.token, codec, False)) for each in own]
    return {
        "tokens": [token_name(each.token, codec, as_ids) for each in own],
        "token_logprobs": [shown_logprob(each.logprob) for each in own],
        "top_logprobs": [
            {
                token_name(token, codec, as_ids): shown_logprob(logprob)
                for token, logprob in (*each.top, (each.token, each.logprob))
            }
            for each in own
        ],
        "text_offset": list(accumulate(sizes, initial=offset))[:-1],
    }
