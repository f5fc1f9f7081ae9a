"""The texts of a prompt as the model reads them, and the request with these texts replaced.

A `Document` is what the rules and the classifier see as one text. A message is one: its name, its
parts joined as templates join them, and its tool calls. Servers join parts with nothing between them
or with a line break, so a message of several parts is two documents, one for each reading.
Neighbouring messages of the same role are one document too, up to `MAX_JOINED` characters, because
many templates join them; no rule matches across messages of different roles. The definition of each
tool is one document of the role `tools`, and so is each parameter that describes the answer's form.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import eq
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from core.errors import ContentBlocked
from gateway.prompts.template_variables import texts_of_variables, with_texts
from gateway.prompts.tool_lists import GATEWAY_MARKS, ToolList, flat_name, json_text
from gateway.prompts.truncation import texts_of
from gateway.request.inference import InferenceRequest
from gateway.request.plain_messages import PlainMessages
from moderation.policy import SAME_ROLE
from moderation.rules import merged
from moderation.screener import TOOLS
from moderation.verdict import ScreenedText, Span

MAX_JOINED = 4_000

_PLAIN = ("role", "content")  # the fields of most messages
Change = Callable[[str, str], str]  # (text, separator before it) -> the text to send on


class Document(Struct, frozen=True):
    """`separators[i]` stands before `segments[i]`. The second reading of the document before it has
    the same segments."""

    role: str
    segments: tuple[str, ...]
    separators: tuple[str, ...]
    second_reading: bool = False

    @property
    def text(self) -> str:
        if len(self.segments) == 1:
            return self.segments[0]
        pairs = zip(self.separators, self.segments, strict=True)
        return "".join([part for pair in pairs for part in pair][1:])

    def read_again(self) -> "Document | None":
        """The reading with a line break between parts; None for a text without several parts."""
        if "" not in self.separators[1:]:
            return None
        separators = tuple([each or "\n" for each in self.separators])
        return Document(self.role, self.segments, separators, second_reading=True)

    def spans_from(self, reading: "Document", spans: Iterable[Span]) -> list[Span]:
        """Spans of another reading of the same segments as spans of this one."""
        ours, theirs = self._starts(), reading._starts()

        def _place(at: int) -> int:
            number = max(0, bisect_right(theirs, at) - 1)
            return ours[number] + min(at - theirs[number], len(self.segments[number]))

        return [replace(each, start=_place(each.start), end=_place(each.end)) for each in spans]

    def _starts(self) -> list[int]:
        starts, at = [], 0
        for number, segment in enumerate(self.segments):
            at += len(self.separators[number]) if number else 0
            starts.append(at)
            at += len(segment)
        return starts

    def redacted(self, spans: Sequence[Span]) -> tuple[str, ...]:
        """The segments with the spans cut out; a span's category stands where it begins."""
        cuts = merged(spans)
        placed = zip(self.segments, self._starts(), strict=True)
        return tuple([_cut(segment, at, cuts) for segment, at in placed])


def _cut(segment: str, at: int, cuts: Iterable[tuple[int, int, str]]) -> str:
    pieces, position = [], 0
    for start, end, category in cuts:
        first, last = max(0, start - at), min(len(segment), end - at)
        if first >= last:
            continue
        pieces.append(segment[position:first])
        if start >= at:
            pieces.append(f"[{category.upper()}]")
        position = last
    return "".join([*pieces, segment[position:]])


def documents_of(request: InferenceRequest) -> list[Document]:
    return [each for walked in _walk(request) for each in _readings(*walked)]


def _readings(role: str, segments: Sequence[tuple[str, str]]) -> Iterator[Document]:
    document = _document(role, segments)
    yield document
    if (second := document.read_again()) is not None:
        yield second


def screened_texts(request: InferenceRequest) -> list[ScreenedText]:
    """The role and text of each document."""
    texts = _texts_of_turns(request.messages) if request.messages else None
    if texts is None:
        return [each for walked in _walk(request) for each in _texts_read(*walked)]
    tools = map(ScreenedText, repeat(TOOLS), _tool_texts(request))
    parameters = [text for each in _parameters(request) for text in _texts_read(*each)]
    return [*texts, *tools, *parameters]


def _texts_read(role: str, segments: Sequence[tuple[str, str]]) -> list[ScreenedText]:
    if len(segments) == 1:
        return [ScreenedText(role, segments[0][0])]
    return [ScreenedText(role, each.text) for each in _readings(role, segments)]


def _texts_of_turns(messages: Sequence[Mapping[str, Any]]) -> list[ScreenedText] | None:
    """Of plain messages whose roles take turns, where each is a document; None for others. It does
    in a third of the time what `_walk` does."""
    if type(messages) is PlainMessages:
        roles = messages.roles
        if "developer" in roles:
            roles = tuple([SAME_ROLE.get(role, role) for role in roles])
        if any(map(eq, roles, roles[1:])):
            return None
        return list(map(ScreenedText, roles, messages.texts))
    texts: list[ScreenedText] = []
    before, same = "", SAME_ROLE.get
    for message in messages:
        role, content = message["role"], message.get("content")
        own = same(role, role)
        if own == before or len(message) != len(_PLAIN) or not isinstance(content, str):
            return None
        before = own
        texts.append(ScreenedText(own, content))
    return texts


def continued_text(request: InferenceRequest, choice: int) -> str:
    """The text that an answer continues, or that is delivered before it: the prompt of a completion,
    a chat's last message where it is continued or echoed."""
    if request.messages is None:
        number = choice // request.n
        prompt = request.prompts[number] if number < len(request.prompts) else ""
        if isinstance(prompt, str):
            return prompt
        known = request.decoded_prompts
        return known[number] if len(known) == len(request.prompts) else ""
    if not (request.continue_final_message or request.echo):
        return ""
    last = request.messages[-1]
    if last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join([part.get("text", "") for part in content])


def with_redactions(request: InferenceRequest, spans: Sequence[Span]) -> InferenceRequest:
    """The request with the spans cut out of its texts. ContentBlocked for one that cannot be: the
    description of an answer's form."""
    by_document: dict[int, list[Span]] = {}
    for span in spans:
        by_document.setdefault(span.index, []).append(span)
    read: list[tuple[Document, list[Span]]] = []
    for index, document in enumerate(documents_of(request)):
        cut = by_document.get(index, [])
        if document.second_reading:
            first, own = read[-1]
            own += first.spans_from(document, cut)
        else:
            read.append((document, cut))
    new = [document.redacted(cut) for document, cut in read]
    return _rebuilt(request, iter([text for segments in new for text in segments]))


def _document(role: str, segments: Sequence[tuple[str, str]]) -> Document:
    if len(segments) == 1:
        return Document(role, (segments[0][0],), ("",))
    return Document(role, tuple([t for t, _ in segments]), tuple([s for _, s in segments]))


def _walk(request: InferenceRequest) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(role, segments with the separators before them), in the order of `_rebuilt`."""
    if request.messages is None:
        yield from (("user", [(text, "")]) for text in texts_of(request))
        return
    role, joined, size = "", list[tuple[str, str]](), 0
    same = SAME_ROLE.get
    for message in request.messages:
        own = message["role"]
        own = same(own, own)
        content = message.get("content")
        if isinstance(content, str) and len(message) == len(_PLAIN):
            found, length = [(content, "\n")], len(content)
        else:
            found = _collected(message)
            length = sum([len(text) for text, _ in found])
        if joined and (own != role or size + length > MAX_JOINED):
            yield role, joined
            joined, size = [], 0
        role, size = own, size + length
        joined += found
    if joined:
        yield role, joined
    yield from _beside_messages(request)


def _beside_messages(request: InferenceRequest) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for text in _tool_texts(request):
        yield TOOLS, [(text, "")]
    yield from _parameters(request)


def _tool_texts(request: InferenceRequest) -> Sequence[str]:
    tools = request.tools or ()
    if type(tools) is ToolList:
        return tools.texts
    return [json_text(_without_marks(tool)) for tool in tools]


def _parameters(request: InferenceRequest) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for text in request.tool_reasoning.values():
        yield "assistant", [(text, "\n")]
    for value in _described(request):
        yield TOOLS, [(json_text(value), "")]
    if request.chat_template_kwargs:
        texts = texts_of_variables(request.chat_template_kwargs)
        if texts:
            yield "user", [(text, "\n") for text in texts]


def _collected(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    _message(message, _collector(found))
    return found


def _collector(found: list[tuple[str, str]]) -> Change:
    def _collect(text: str, separator: str) -> str:
        found.append((text, separator))
        return text

    return _collect


def _rebuilt(request: InferenceRequest, texts: Iterator[str]) -> InferenceRequest:
    if request.inputs is not None:
        return replace(request, inputs=list(texts), decoded_prompts=())
    if request.messages is None:
        return replace(request, prompts=tuple(texts), decoded_prompts=())
    changed: dict[str, str] = {}

    def _next(text: str, _before: str) -> str:
        new = next(texts)
        if new != text:
            changed[text] = new
        return new

    messages = [_message(message, _next) for message in request.messages]
    tools = [_tool(tool, next(texts)) for tool in request.tools or ()]
    reasoning = {call: next(texts) for call in request.tool_reasoning}
    for value in _described(request):
        if next(texts) != json_text(value):
            raise _not_redactable("the description of the answer's format")
    variables = with_texts(request.chat_template_kwargs, texts)
    return replace(
        request,
        messages=messages,
        tools=tools or None,
        tool_reasoning=reasoning,
        chat_template_kwargs=variables,
        extra=_echoed(request, tools, changed),
    )


def _message(message: Mapping[str, Any], change: Change) -> dict[str, Any]:
    new = dict(message)
    if isinstance(message.get("name"), str):
        new["name"] = change(message["name"], "\n")
    content = message.get("content")
    if isinstance(content, str):
        new["content"] = change(content, "\n")
    elif isinstance(content, list):
        separators = chain("\n", repeat(""))
        new["content"] = [
            {**part, "text": change(part["text"], next(separators))} if "text" in part else part
            for part in content
        ]
    if isinstance(message.get("refusal"), str):
        new["refusal"] = change(message["refusal"], "\n")
    if message.get("tool_calls"):
        new["tool_calls"] = [
            {**call, "function": _call(call["function"], change)} if call.get("function") else call
            for call in message["tool_calls"]
        ]
    if message.get("function_call"):
        new["function_call"] = _call(message["function_call"], change)
    return new


def _call(function: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Arguments are read as canonical JSON, because escapes such as `\\u0040` hide a match."""
    name = change(str(function.get("name") or ""), "\n")
    given = function.get("arguments")
    text = _canonical(given)
    new = change(text, "\n")
    if new == text:
        return {**function, "name": name}
    arguments = new if _parsed(new) is not None else json_text({"redacted": new})
    return {**function, "name": name, "arguments": arguments}


def _tool(tool: dict[str, Any], text: str) -> dict[str, Any]:
    plain = _without_marks(tool)
    if text == json_text(plain):
        return tool
    new = _parsed(text)
    function = new.get("function") if isinstance(new, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _not_redactable("the definition of a tool")
    return {**tool, **new}


def _described(request: InferenceRequest) -> list[Any]:
    """Parameters that an upstream may show to the model, such as a schema of the answer."""
    return [each for each in request.engine_parameters.values() if isinstance(each, dict | list)]


def _echoed(
    request: InferenceRequest, tools: Sequence[dict[str, Any]], changed: Mapping[str, str]
) -> dict[str, Any]:
    """`extra`, from which the Responses API repeats the instructions and tools in its answer."""
    extra = dict(request.extra)
    instructions = extra.get("instructions")
    if isinstance(instructions, str):
        extra["instructions"] = changed.get(instructions, instructions)
    if tools and isinstance(extra.get("tools"), list):
        by_name = {tool["function"]["name"]: tool["function"] for tool in tools}
        extra["tools"] = [_echoed_tool(each, by_name) for each in extra["tools"]]
    return extra


def _echoed_tool(
    given: dict[str, Any], by_name: Mapping[str, dict[str, Any]], namespace: str = ""
) -> dict[str, Any]:
    """The tool as screened; by name, since prompt order may have moved it."""
    if given["type"] == "namespace":
        inner = [_echoed_tool(each, by_name, given["name"]) for each in given["tools"]]
        return {**given, "tools": inner}
    name = flat_name(namespace, given["name"]) if namespace else given["name"]
    screened = by_name.get(name, {})
    return {**given, **{k: v for k, v in screened.items() if k in given and k != "name"}}


def _canonical(given: Any) -> str:
    if not isinstance(given, str):
        return json_text(given)
    parsed = _parsed(given)
    return given if parsed is None else json_text(parsed)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_marks(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tool.items() if key not in GATEWAY_MARKS}


def _not_redactable(what: str) -> ContentBlocked:
    return ContentBlocked(
        f"The moderation policy redacts a part of {what}, which would then be invalid.",
        next_step="Remove what the policy redacts, or ask your administrator about the policy.",
        param="tools",
    )
