"""Reads responses, whole or by their typed events. Items have a place, since some servers change their
ids on the way."""

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.engines.answer_fields import Said
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.responses.usage import split_of_usage
from gateway.engines.ports.split import Split
from gateway.request.thoughts import OPENAI, encrypted

log = logging.getLogger("tollhouse.upstream")
_INCOMPLETE = {
    "max_output_tokens": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
}
_STATUSES = {
    "rate_limit_exceeded": 429,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "content_filter": 400,
    "server_error": 500,
}
_CALLS = ("function_call", "custom_tool_call")
_OWN_TOOLS = ("file_search_call", "code_interpreter_call")  # that the provider runs
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_PARAGRAPH = "\n\n"


class _TextEvent(msgspec.Struct):
    type: str
    delta: str = ""
    logprobs: Any = None


_text_decoder = msgspec.json.Decoder(_TextEvent)


class ResponseReader:
    ended = False
    _is_new = False
    _searches = 0
    _tool_calls = 0  # of the provider's other tools

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._calls: dict[int, int] = {}  # number of the call by its item's place
        self._written: set[int] = set()  # items of which something was said
        self._summaries: dict[int, int] = {}  # part of the summary that an item is at

    def text(self, data: bytes) -> str:
        try:
            event = _text_decoder.decode(data)
        except (ValueError, msgspec.MsgspecError):
            return ""
        is_text = event.type == "response.output_text.delta" and not event.logprobs
        return event.delta if is_text else ""

    def read(self, event: dict[str, Any]) -> Iterable[Said]:
        kind, place = str(event.get("type")), int(event.get("output_index") or 0)
        if kind == "response.output_text.delta":
            listed = event.get("logprobs")
            logprobs = {"content": listed} if listed else None
            return [Said(text=event["delta"], logprobs=logprobs)]
        if kind == "response.refusal.delta":
            return [Said(refusal=event["delta"])]
        if kind in ("response.reasoning_summary_text.delta", "response.reasoning_text.delta"):
            return [Said(reasoning=self._begun(place, event) + event["delta"])]
        if kind in (
            "response.function_call_arguments.delta",
            "response.custom_tool_call_input.delta",
        ):
            return [self._arguments(place, event["delta"])] if place in self._calls else []
        if kind == "response.output_item.added":
            return self._added(place, event["item"])
        if kind == "response.output_item.done":
            return self._done(place, event["item"])
        if kind == "response.output_text.annotation.added":
            notes = _annotations([event.get("annotation")])
            return [Said(annotations=notes)] if notes else []
        if kind in _ENDS:
            self.ended = True
            return [self._end(event["response"])]
        if kind == "error":
            raise reported(event.get("error") or event)
        return []

    def whole(self, answer: dict[str, Any]) -> Iterable[Said]:
        if not isinstance(answer.get("output"), list):
            if answer.get("error"):
                raise reported(answer["error"])
            raise KeyError("output")
        for place, item in enumerate(answer["output"]):
            if item["type"] == "message":
                for part in item["content"]:
                    yield _part(part)
            elif item["type"] in _CALLS:
                yield from self._added(place, item)
                yield from self._done(place, item)
            elif item["type"] == "reasoning":
                if text := _thought(item):
                    yield Said(reasoning=text)
                yield from self._done(place, item)
            else:
                yield from self._done(place, item)
        yield self._end(answer)

    def take_usage(self) -> Split | None:
        is_new, self._is_new = self._is_new, False
        return split_of_usage(self._usage, self._searches, self._tool_calls) if is_new else None

    def _begun(self, place: int, event: dict[str, Any]) -> str:
        """What stands between two parts of a summary."""
        part = int(event.get("summary_index") or event.get("content_index") or 0)
        before = self._summaries.get(place)
        self._summaries[place] = part
        return _PARAGRAPH if before is not None and before != part else ""

    def _added(self, place: int, item: dict[str, Any]) -> list[Said]:
        if item.get("type") not in _CALLS:
            return []
        number = self._calls[place] = len(self._calls)
        function = {"name": str(item["name"]), "arguments": ""}
        call_id = str(item.get("call_id") or item.get("id") or "")
        return [
            Said(calls=[{"index": number, "id": call_id, "type": "function", "function": function}])
        ]

    def _done(self, place: int, item: dict[str, Any]) -> list[Said]:
        kind = item.get("type")
        if kind in _CALLS and place not in self._written:
            begun = [] if place in self._calls else self._added(place, item)
            text = item.get("arguments") if kind == "function_call" else item.get("input")
            return [*begun, self._arguments(place, str(text or ""))]
        if kind == "reasoning" and item.get("encrypted_content"):
            detail = encrypted(str(item["encrypted_content"]), OPENAI, item.get("id"))
            if item.get("summary"):
                detail["parts"] = item["summary"]
            return [Said(details=[detail])]
        if kind == "web_search_call":
            action = item.get("action")
            self._searches += not isinstance(action, dict) or action.get("type") in (None, "search")
        self._tool_calls += kind in _OWN_TOOLS
        return []

    def _arguments(self, place: int, text: str) -> Said:
        self._written.add(place)
        return Said(calls=[{"index": self._calls[place], "function": {"arguments": text}}])

    def _end(self, response: dict[str, Any]) -> Said:
        if isinstance(usage := response.get("usage"), dict) and usage:
            self._usage |= usage
            self._is_new = True
        status = response.get("status")
        if status == "failed" or (response.get("error") and status != "completed"):
            raise reported(response.get("error"))
        if status == "incomplete":
            why = str((response.get("incomplete_details") or {}).get("reason"))
            if why not in _INCOMPLETE:
                log.warning("the unknown reason %r is taken for a limit", why[:80])
            return Said(reason=_INCOMPLETE.get(why, "length"))
        return Said(reason="tool_calls" if self._calls else "stop")


def _part(part: dict[str, Any]) -> Said:
    if part["type"] == "refusal":
        return Said(refusal=str(part["refusal"]))
    listed = part.get("logprobs")
    notes = _annotations(part.get("annotations"))
    logprobs = {"content": listed} if listed else None
    return Said(text=str(part.get("text") or ""), annotations=notes or None, logprobs=logprobs)


def _thought(item: dict[str, Any]) -> str:
    parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
    return _PARAGRAPH.join([str(each.get("text") or "") for each in parts])


def _annotations(listed: Any) -> list[dict[str, Any]]:
    """As a chat writes them: the fields of a page's citation in an object of their own."""
    found = []
    for each in listed or ():
        if not isinstance(each, dict):
            continue
        if each.get("type") == "url_citation" and "url_citation" not in each:
            held = {name: value for name, value in each.items() if name != "type"}
            each = {"type": "url_citation", "url_citation": held}
        found.append(each)
    return found


def reported(error: Any) -> ReportedError:
    code = error.get("code") if isinstance(error, dict) else None
    return ReportedError(_STATUSES.get(str(code), 500), error)
