"""/v1/chat/completions: responses and stream chunks in OpenAI's format."""

from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import TollhouseError
from engine.protocol import TokenLogprob
from gateway.answers.choices import ChoiceOutput, Delta
from gateway.answers.surface import ResponseInfo
from gateway.answers.tool_calls import ToolCall
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.edge.api_errors import error_object
from gateway.formats.chat.request import ROUTE, parse_chat
from gateway.formats.prompt_logprobs import prompt_logprobs_object
from gateway.request.inference import InferenceRequest, Usage
from gateway.request.thoughts import FIELD

DONE = b"data: [DONE]\n\n"


class ChatSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> InferenceRequest:
        return parse_chat(raw)

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> "ChatStream":
        return ChatStream(info, request)

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        return {
            "id": completion_id("chatcmpl", info),
            "object": "chat.completion",
            "created": info.created,
            "model": info.model,
            "choices": [_choice(each, info.codec, request) for each in choices],
            "usage": usage_object(usage),
            "service_tier": request.service_tier or "default",
            # vLLM's fields, null where they are not asked for.
            "prompt_logprobs": _of_prompt(choices[0], info.codec, request),
            "prompt_token_ids": info.prompts[0] if request.return_token_ids else None,
        }

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class ChatStream:
    """Encodes the constant part of the chunks once per stream."""

    def __init__(self, info: ResponseInfo, request: InferenceRequest) -> None:
        self._codec = info.codec
        self._logprobs = request.logprobs is not None
        self._as_ids = request.return_tokens_as_token_ids
        self._ids = request.return_token_ids
        self._reasons = request.include_reasoning
        self._echo = echoed(request)
        self._include_usage = request.include_usage
        self._legacy = bool(request.extra.get("legacy_functions"))
        shell = {
            "id": completion_id("chatcmpl", info),
            "object": "chat.completion.chunk",
            "created": info.created,
            "model": info.model,
        }
        if request.service_tier is not None:
            shell["service_tier"] = request.service_tier
        self._start = b"data: " + orjson.dumps(shell)[:-1]
        self._first = self._start
        if self._ids:
            self._first = (
                b"data: " + orjson.dumps({**shell, "prompt_token_ids": info.prompts[0]})[:-1]
            )
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        self._running = RunningUsage(info.prompt_tokens) if request.continuous_usage else None
        self._begun: set[int] = set()
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if self._is_plain(delta):
            head = b'%b,"choices":[{"index":%d,"delta":{"content":' % (self._start, delta.choice)
            return head + orjson.dumps(delta.text) + self._plain_tail
        content: dict[str, Any] = {}
        text = delta.text
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            text = self._echo + text
            content = {"role": "assistant", "content": text, "refusal": None}
        elif text:
            content = {"content": text}
        if delta.refused and content:
            content |= {"content": None, "refusal": text or None}
        if delta.reasoning and self._reasons:
            content |= _thoughts(delta.reasoning)
            if not text and "content" in content:
                content["content"] = None
        if delta.calls and self._legacy:
            content["function_call"] = call_object(delta.calls[0])["function"]
        elif delta.calls:
            content["tool_calls"] = [
                {"index": each.index, **call_object(each)} for each in delta.calls
            ]
        if delta.calls and not text and "content" in content:
            content["content"] = None
        content |= _beside(delta, reasons=self._reasons)
        if self._running is not None:
            self._tail = self._running.tail(delta)
        parts = []
        if content or (self._logprobs and delta.logprobs):
            parts.append(self._chunk(delta, content, None))
        if delta.finish_reason is not None:
            reason = _reason(delta.finish_reason, legacy=self._legacy)
            parts.append(self._chunk(delta, {}, reason, bare=bool(parts)))
        return b"".join(parts)

    def _is_plain(self, delta: Delta) -> bool:
        """Whether it is a further piece of text and nothing else, as most are."""
        return bool(
            delta.text
            and delta.finish_reason is None
            and not (delta.reasoning or delta.calls or self._logprobs or self._ids)
            and not (delta.details or delta.annotations)
            and not delta.refused
            and self._running is None
            and delta.choice in self._begun
        )

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        if not self._include_usage:
            return DONE
        payload = orjson.dumps(usage_object(usage))
        return self._start + b',"choices":[],"usage":' + payload + b"}\n\n" + DONE

    def failed(self, error: TollhouseError) -> bytes:
        return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"

    def _chunk(
        self, delta: Delta, content: dict[str, Any], reason: str | None, *, bare: bool = False
    ) -> bytes:
        logprobs = None
        if self._logprobs and not bare:
            logprobs = logprobs_object(
                delta.logprobs, delta.upstream_logprobs, self._codec, as_ids=self._as_ids
            )
        choice = {
            "index": delta.choice,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if self._ids:
            choice["token_ids"] = [] if bare else token_ids(delta)
        start, self._first = self._first, self._start
        return start + b',"choices":[' + orjson.dumps(choice) + b"]" + self._tail


class RunningUsage:
    """The counts so far, for a stream with `continuous_usage_stats`."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._output: dict[int, int] = {}  # by choice

    def tail(self, delta: Delta) -> bytes:
        """The end of a chunk. Without counts (a text engine's come at the end) its usage is null."""
        self._output[delta.choice] = delta.tokens
        output = sum(self._output.values())
        if not output:
            return b',"usage":null}\n\n'
        usage = orjson.dumps(usage_object(Usage(self._prompt, 0, output)))
        return b',"usage":' + usage + b"}\n\n"


def call_object(call: ToolCall) -> dict[str, Any]:
    payload = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": payload}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def completion_id(prefix: str, info: ResponseInfo) -> str:
    return f"{prefix}-{info.request_id.rpartition('_')[2]}"


def logprobs_object(
    own: list[TokenLogprob],
    upstream: list[dict[str, Any]],
    codec: TextCodec | None,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """With `as_ids` a token is `token_id:` and its id, as vLLM writes it. `bytes` are those that it
    stands for, perhaps a part of a character."""
    content = [_token(each, codec, as_ids) for each in own]
    for given in upstream:
        content += given.get("content") or []
    return {"content": content, "refusal": None}


def _token(each: TokenLogprob, codec: TextCodec | None, as_ids: bool) -> dict[str, Any]:
    top = [_token_object(token, logprob, codec, as_ids) for token, logprob in each.top]
    return {**_token_object(each.token, each.logprob, codec, as_ids), "top_logprobs": top}


def token_name(token: int, codec: TextCodec | None, as_ids: bool) -> str:
    if as_ids:
        return f"token_id:{token}"
    return codec.token_text(token) if codec else ""


def shown_logprob(logprob: float) -> float:
    """JSON has no infinity, which is that of a token that was excluded."""
    return max(logprob, -9999.0)


def token_ids(delta: Delta) -> list[int]:
    return [each.token for each in delta.logprobs]


def echoed(request: InferenceRequest) -> str:
    """The assistant's last message, where the client asks for it before the answer."""
    last = request.messages[-1] if request.echo and request.messages else {}
    if last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _beside(delta: Delta, *, reasons: bool) -> dict[str, Any]:
    """Signed reasoning, in OpenRouter's field, and citations."""
    content: dict[str, Any] = {}
    if delta.details and reasons:
        content[FIELD] = delta.details
    if delta.annotations:
        content["annotations"] = delta.annotations
    return content


def _thoughts(reasoning: str) -> dict[str, str]:
    """By the name that most clients read, and by vLLM's newer one."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _token_object(
    token: int, logprob: float, codec: TextCodec | None, as_ids: bool
) -> dict[str, Any]:
    return {
        "token": token_name(token, codec, as_ids),
        "logprob": shown_logprob(logprob),
        "bytes": list(codec.token_bytes(token)) if codec else [],
    }


def _of_prompt(
    choice: ChoiceOutput, codec: TextCodec | None, request: InferenceRequest
) -> list[dict[str, Any] | None] | None:
    wanted = request.prompt_logprobs
    if wanted is None:
        return None
    return prompt_logprobs_object(choice.prompt_logprobs, wanted, codec)


def _choice(
    choice: ChoiceOutput, codec: TextCodec | None, request: InferenceRequest
) -> dict[str, Any]:
    logprobs = request.logprobs is not None
    delta = choice.take() or Delta(choice.index, "")
    text = echoed(request) + "".join(choice.text)
    legacy = bool(request.extra.get("legacy_functions"))
    calls: dict[str, Any] = {}
    if choice.calls and legacy:
        calls = {"function_call": call_object(choice.calls[0])["function"]}
    elif choice.calls:
        calls = {"tool_calls": [call_object(each) for each in choice.calls]}
    reasoning = "".join(choice.reasoning) if request.include_reasoning else ""
    thoughts = _thoughts(reasoning) if reasoning else {"reasoning": None}
    details = {FIELD: choice.details} if choice.details and request.include_reasoning else {}
    return {
        "index": choice.index,
        "message": {
            "role": "assistant",
            "content": text if (text or not calls) and not choice.refused else None,
            "refusal": text if choice.refused else None,
            "annotations": choice.annotations,
            **calls,
            **thoughts,
            **details,
        },
        "logprobs": logprobs_object(
            delta.logprobs,
            delta.upstream_logprobs,
            codec,
            as_ids=request.return_tokens_as_token_ids,
        )
        if logprobs
        else None,
        "finish_reason": _reason(choice.finish_reason, legacy=legacy) or "stop",
        "token_ids": token_ids(delta) if request.return_token_ids else None,
    }


def _reason(given: str | None, *, legacy: bool) -> str | None:
    return "function_call" if legacy and given == "tool_calls" else given
