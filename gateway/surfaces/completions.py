"""/v1/completions: responses and stream chunks in OpenAI's legacy format."""

from collections.abc import Sequence
from typing import Any

import orjson

from core.errors import TollhouseError
from engine.protocol import TokenLogprob
from gateway.ask import Ask, Usage
from gateway.prompts.tokenizing import TextCodec
from gateway.schemas.completions import ROUTE, parse_completion
from gateway.streaming.choices import ChoiceOutput, Delta
from gateway.surface import Head
from gateway.surfaces.chat import DONE, completion_id, usage_object
from gateway.surfaces.openai_errors import error_object


class CompletionsSurface:
    route = ROUTE
    style = "openai"

    def parse(self, raw: bytes) -> Ask:
        return parse_completion(raw)

    def stream(self, head: Head, ask: Ask) -> "CompletionStream":
        return CompletionStream(head, ask)

    def answer(
        self, head: Head, ask: Ask, choices: Sequence[ChoiceOutput], usage: Usage
    ) -> dict[str, Any]:
        return {
            **_shell(head),
            "choices": [_choice(each, head, ask) for each in choices],
            "usage": usage_object(usage),
        }

    def error(self, error: TollhouseError, request_id: str) -> dict[str, Any]:
        return error_object(error)


class CompletionStream:
    def __init__(self, head: Head, ask: Ask) -> None:
        self._head = head
        self._ask = ask
        self._shell = orjson.dumps(_shell(head))[:-1]
        self._tail = b',"usage":null}\n\n' if ask.include_usage else b"}\n\n"
        self._offsets: dict[int, int] = {}

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        text, offset = delta.text, self._offsets.get(delta.choice)
        if offset is None:
            text = _echoed(self._ask, self._head, delta.choice) + text
            offset = 0
        self._offsets[delta.choice] = offset + len(text)
        choice = {
            "index": delta.choice,
            "text": text,
            "logprobs": _logprobs(delta.logprobs, self._head.codec, offset)
            if self._ask.logprobs is not None
            else None,
            "finish_reason": delta.finish_reason,
        }
        return b"data: " + self._shell + b',"choices":[' + orjson.dumps(choice) + b"]" + self._tail

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        if not self._ask.include_usage:
            return DONE
        told = orjson.dumps(usage_object(usage))
        return b"data: " + self._shell + b',"choices":[],"usage":' + told + b"}\n\n" + DONE

    def failed(self, error: TollhouseError) -> bytes:
        return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"


def _shell(head: Head) -> dict[str, Any]:
    return {
        "id": completion_id("cmpl", head),
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
    }


def _choice(choice: ChoiceOutput, head: Head, ask: Ask) -> dict[str, Any]:
    delta = choice.take() or Delta(choice.index, "")
    before = _echoed(ask, head, choice.index)
    return {
        "index": choice.index,
        "text": before + "".join(choice.text),
        "logprobs": _logprobs(delta.logprobs, head.codec, len(before))
        if ask.logprobs is not None
        else None,
        "finish_reason": choice.finish_reason or "stop",
    }


def _echoed(ask: Ask, head: Head, choice: int) -> str:
    if not ask.echo:
        return ""
    prompt = ask.prompts[choice // ask.n]
    if isinstance(prompt, str):
        return prompt
    return head.codec.decode(prompt) if head.codec else ""


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
        "top_logprobs": [{_text(t): logprob for t, logprob in each.top} for each in own],
        "text_offset": offsets,
    }
