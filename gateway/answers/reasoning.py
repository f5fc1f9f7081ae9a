"""Reads what a model writes: first its reasoning, if it marks that, then text and tool calls."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from gateway.answers import harmony
from gateway.answers.harmony import HarmonyReader
from gateway.answers.tool_calls import ToolCall, ToolReader
from gateway.answers.tool_formats import TOKENS
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.prompts.tool_lists import ToolList
from gateway.request.inference import InferenceRequest

_HEADER = 256  # last ids of a prompt, which have the header of a message that it begins
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # Qwen and DeepSeek; Mistral


class ReasoningReader:
    """`feed` and `flush` return (reasoning, answer). White space at the ends of both is dropped where
    they meet; text that may still be a tag, or such white space, is held.

    Further reasoning begins with a tag at the beginning of the answer or of one of its lines."""

    def __init__(self, tags: tuple[str, str], *, begun: bool) -> None:
        """`begun`: the prompt ends with the opening tag."""
        self._open, self._close = tags
        self._held = ""
        self._fed = self._end = 0  # characters
        self._state = "reasoning" if begun else "start"
        self._lead = begun  # white space at the beginning of the reasoning or the answer is dropped
        self._answered = False  # the answer has begun
        self._at_line_start = True
        self._between = ""  # what stands between this reasoning and the one before

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def end(self) -> float:
        """Where, in the text fed, the reasoning before the answer ends; infinite while it goes on."""
        return inf if self._state == "reasoning" and not self._answered else self._end

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        self._fed += len(text)
        if self._state == "start":
            self._begin()
        reasoning = answer = ""
        while True:
            if self._state == "reasoning":
                reasoning += self._reason()
            if self._state != "answer":
                return reasoning, answer
            answer += self._answer()
            if self._state == "answer":
                return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """An opening tag that was not completed is the answer."""
        left, self._held = self._held, ""
        if self._state == "reasoning":
            return self._joined(left.strip() if self._lead else left.rstrip()), ""
        return "", "" if self._lead and not left.strip() else left

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._open):
            self._held = text.removeprefix(self._open)
            self._state, self._lead = "reasoning", True
        elif text and not self._open.startswith(text):
            self._state = "answer"

    def _reason(self) -> str:
        if self._lead:
            self._held = self._held.lstrip()
        at = self._held.find(self._close)
        if at >= 0:
            reasoning = self._held[:at].rstrip()
            self._held = self._held[at + len(self._close) :]
            if not self._answered:
                self._end = self._fed - len(self._held)
            self._state, self._lead, self._at_line_start = "answer", True, True
            reasoning = self._joined(reasoning)
            self._between = "\n"
            return reasoning
        sure = len(self._held) - _partial(self._held, self._close)
        reasoning = self._held[:sure].rstrip()
        self._held = self._held[len(reasoning) :]
        self._lead = self._lead and not reasoning
        return self._joined(reasoning)

    def _joined(self, reasoning: str) -> str:
        if not reasoning:
            return ""
        joined, self._between = self._between + reasoning, ""
        return joined

    def _answer(self) -> str:
        """Up to the tag of further reasoning, or what cannot be one."""
        if self._lead:
            self._held = self._held.lstrip()
            self._lead = not self._held
        held, at = self._held, self._held.find(self._open)
        while at >= 0 and not self._starts_line(at):
            at = held.find(self._open, at + 1)
        if at >= 0:
            text, self._held = held[:at], held[at + len(self._open) :]
            self._state, self._lead = "reasoning", True
        else:
            keep = _partial(held, self._open)
            keep = keep if self._starts_line(len(held) - keep) else 0
            text, self._held = held[: len(held) - keep], held[len(held) - keep :]
        if text:
            self._answered = True
            line = text.rpartition("\n")[2]
            self._at_line_start = not line.strip() and ("\n" in text or self._at_line_start)
        return text

    def _starts_line(self, at: int) -> bool:
        """Whether nothing but spaces stands before that place in its line."""
        _, found, line = self._held[:at].rpartition("\n")
        return not line.strip() and (bool(found) or self._at_line_start)


class Thoughts(Protocol):
    @property
    def held(self) -> int: ...

    @property
    def end(self) -> float: ...

    def feed(self, text: str) -> tuple[str, str]: ...

    def flush(self) -> tuple[str, str]: ...


class OutputReader:
    """`feed` and `flush` return (text, complete calls); the reasoning is collected separately."""

    def __init__(
        self,
        tools: ToolReader | None,
        thoughts: Thoughts | None = None,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """`shown`: control tokens, by id, that are part of what is read."""
        self._tools = tools
        self._thoughts = thoughts
        self._reasoning: list[str] = []
        self.shown = shown or {}

    @property
    def held(self) -> int:
        held = self._tools.held if self._tools is not None else 0
        return held + (self._thoughts.held if self._thoughts is not None else 0)

    @property
    def reasoning_end(self) -> float:
        """Characters of the text fed that are reasoning; infinite while it goes on."""
        return self._thoughts.end if self._thoughts is not None else 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        if self._thoughts is not None:
            text = self._split(*self._thoughts.feed(text))
        return (text, []) if self._tools is None else self._tools.feed(text)

    def flush(self, *, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """`cut`: the output has reached its longest."""
        text, calls = "", list[ToolCall]()
        if self._thoughts is not None:
            text = self._split(*self._thoughts.flush())
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            rest, more = self._tools.flush(cut=cut)
            text, calls = text + rest, calls + more
        return text, calls

    def read_marks(self, thoughts: Thoughts) -> None:
        """From now on, of an upstream that sends reasoning apart."""
        self._thoughts = thoughts

    def take_reasoning(self) -> str:
        """What was added since the last call."""
        taken, self._reasoning = "".join(self._reasoning), []
        return taken

    def _split(self, reasoning: str, answer: str) -> str:
        if reasoning:
            self._reasoning.append(reasoning)
        return answer


Reader = OutputReader | HarmonyReader


def reader_for(
    request: InferenceRequest, codec: TextCodec | None = None, prompt: list[int] | None = None
) -> Reader | None:
    """`codec`: of an engine of tokens, whose output is read for reasoning too; `prompt`: its ids."""
    listed = request.tools or ()
    names: Sequence[str]
    if type(listed) is ToolList:
        names = listed.names
    else:
        names = [str(each["function"]["name"]) for each in listed]
    tools = ToolReader(names) if names else None
    thoughts = None
    # An answer whose form is fixed has no reasoning before it.
    if codec is not None and request.messages is not None and not request.engine_parameters:
        if writes_harmony(codec):
            begun = harmony.begun_message(codec.decode((prompt or [])[-_HEADER:], special=True))
            return HarmonyReader(names, begun, codec.control_tokens(harmony.TAGS))
        thoughts = _reasoning_reader(codec, prompt or [])
    if tools is None and thoughts is None:
        return None
    return OutputReader(tools, thoughts, codec.control_tokens(_SHOWN) if codec else None)


def marks_reasoning(codec: TextCodec) -> bool:
    """Whether the model's chat template knows tags around reasoning."""
    return _tags_of(codec) is not None or writes_harmony(codec)


def writes_harmony(codec: TextCodec) -> bool:
    """Whether the model's chat template is of the harmony format, as gpt-oss's is."""
    source = codec.template.source if codec.template is not None else ""
    return harmony.CHANNEL in source and harmony.MESSAGE in source


def _tags_of(codec: TextCodec) -> tuple[str, str] | None:
    source = codec.template.source if codec.template is not None else ""
    return next((tags for tags in _TAGS if tags[1] in source), None)


def _reasoning_reader(codec: TextCodec, prompt: list[int]) -> ReasoningReader | None:
    tags = _tags_of(codec)
    if tags is None:
        return None
    end = codec.decode(prompt[-8:], special=True).rstrip()
    return ReasoningReader(tags, begun=end.endswith(tags[0]))


_SHOWN = TOKENS | {tag for tags in _TAGS for tag in tags}


def _partial(held: str, tag: str) -> int:
    """Length of the longest suffix that is a prefix of the tag."""
    for length in range(min(len(tag) - 1, len(held)), 0, -1):
        if tag.startswith(held[-length:]):
            return length
    return 0
