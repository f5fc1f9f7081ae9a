"""Reads Gemini's answers: each event of a stream has the form of a whole answer, with new parts."""

import logging
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import msgspec

from gateway.engines.answer_fields import Said
from gateway.engines.ports.gemini.usage import split_of_usage
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.split import Split
from gateway.engines.ports.tool_text import arguments_text
from gateway.request.thoughts import GEMINI, encrypted

log = logging.getLogger("tollhouse.upstream")
REASONS = {
    "STOP": "stop",
    "FINISH_REASON_UNSPECIFIED": "stop",
    "OTHER": "stop",
    "MALFORMED_FUNCTION_CALL": "stop",
    "UNEXPECTED_TOOL_CALL": "stop",
    "TOO_MANY_TOOL_CALLS": "stop",
    "MISSING_THOUGHT_SIGNATURE": "stop",
    "MALFORMED_RESPONSE": "stop",
    "NO_IMAGE": "stop",
    "IMAGE_OTHER": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "LANGUAGE": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "IMAGE_PROHIBITED_CONTENT": "content_filter",
    "IMAGE_RECITATION": "content_filter",
    "MODEL_ARMOR": "content_filter",
}


class _Part(msgspec.Struct):
    text: str = ""
    thought: Any = None
    thoughtSignature: Any = None
    functionCall: Any = None
    inlineData: Any = None


class _Content(msgspec.Struct):
    parts: tuple[_Part]


class _Candidate(msgspec.Struct):
    content: _Content
    index: int = 0
    finishReason: Any = None
    logprobsResult: Any = None
    groundingMetadata: Any = None


class _TextEvent(msgspec.Struct):
    candidates: tuple[_Candidate]
    usageMetadata: Any = None


_text_decoder = msgspec.json.Decoder(_TextEvent)


class GeminiReader:
    ended = False  # the connection's end is the stream's
    _is_new = False

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._calls: dict[int, int] = {}  # by choice
        self._searches: set[str] = set()

    def text(self, data: bytes) -> str:
        try:
            event = _text_decoder.decode(data)
        except (ValueError, msgspec.MsgspecError):
            return ""
        candidate = event.candidates[0]
        part = candidate.content.parts[0]
        if (
            candidate.index
            or candidate.finishReason is not None
            or candidate.logprobsResult is not None
            or candidate.groundingMetadata is not None
            or part.thought
            or part.thoughtSignature is not None
            or part.functionCall is not None
            or part.inlineData is not None
        ):
            return ""
        if part.text and isinstance(event.usageMetadata, dict):
            self._usage |= event.usageMetadata
        return part.text

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        if "error" in event:
            raise reported(event["error"])
        usage = event.get("usageMetadata")
        if isinstance(usage, dict) and usage:
            self._usage |= usage
            self._is_new = True
        candidates = event.get("candidates") or ()
        blocked = (event.get("promptFeedback") or {}).get("blockReason")
        if blocked and not candidates:
            raise ReportedError(400, {"message": f"content policy: the prompt is {blocked}"})
        return [said for candidate in candidates for said in self._candidate(candidate)]

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        if "error" not in answer and "candidates" not in answer and "promptFeedback" not in answer:
            raise KeyError("candidates")
        return self.read(answer)

    def take_usage(self) -> Split | None:
        is_new, self._is_new = self._is_new, False
        return split_of_usage(self._usage, len(self._searches)) if is_new else None

    def _candidate(self, candidate: dict[str, Any]) -> Iterable[Said]:
        index = int(candidate.get("index") or 0)
        for part in (candidate.get("content") or {}).get("parts") or ():
            yield from self._part(index, part)
        if grounding := candidate.get("groundingMetadata"):
            self._searches.update(map(str, grounding.get("webSearchQueries") or ()))
            if notes := _citations(grounding):
                yield Said(index, annotations=notes)
        logprobs = _logprobs(candidate.get("logprobsResult"))
        reason = candidate.get("finishReason")
        if reason is not None and reason not in REASONS:
            log.warning("the unknown finish reason %r is taken for an end", str(reason)[:80])
        if reason is not None or logprobs is not None:
            known = REASONS.get(str(reason), "stop") if reason is not None else None
            yield Said(index, reason=known, logprobs=logprobs)

    def _part(self, index: int, part: dict[str, Any]) -> Iterable[Said]:
        signature = part.get("thoughtSignature")
        if (call := part.get("functionCall")) is not None:
            number = self._calls.get(index, 0)
            self._calls[index] = number + 1
            call_id = str(call.get("id") or f"call_{uuid4().hex}")
            if signature:
                yield Said(index, details=[encrypted(str(signature), GEMINI, call_id)])
            function = {"name": str(call["name"]), "arguments": arguments_text(call.get("args"))}
            piece = {"index": number, "id": call_id, "type": "function", "function": function}
            yield Said(index, calls=[piece])
            return
        text = part.get("text")
        if isinstance(text, str) and text:
            yield Said(index, reasoning=text) if part.get("thought") else Said(index, text)
        elif text is None and "inlineData" in part:
            log.info("a part with data is left out: no surface of ours returns it")
        if signature:
            yield Said(index, details=[encrypted(str(signature), GEMINI)])


def _citations(grounding: dict[str, Any]) -> list[dict[str, Any]]:
    pages = [each.get("web") or {} for each in grounding.get("groundingChunks") or ()]
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "url": str(page.get("uri") or ""),
                "title": str(page.get("title") or ""),
            },
        }
        for page in pages
        if page
    ]


def _logprobs(result: Any) -> dict[str, Any] | None:
    """As OpenAI's object."""
    if not isinstance(result, dict):
        return None
    tops = result.get("topCandidates") or ()
    content = []
    for place, chosen in enumerate(result.get("chosenCandidates") or ()):
        top = (tops[place].get("candidates") or ()) if place < len(tops) else ()
        content.append({**_token(chosen), "top_logprobs": [_token(each) for each in top]})
    return {"content": content} if content else None


def _token(each: dict[str, Any]) -> dict[str, Any]:
    token = str(each.get("token") or "")
    logprob = max(float(each.get("logProbability") or 0.0), -9999.0)
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def reported(error: Any) -> ReportedError:
    code = error.get("code") if isinstance(error, dict) else None
    return ReportedError(code if type(code) is int and 400 <= code < 600 else 500, error)
