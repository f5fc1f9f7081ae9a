"""The parts of OpenAI's answers that are read, and their decoders."""

from typing import Any

import msgspec

from gateway.engines.server_events import loads


class Completion(msgspec.Struct):
    choices: list[dict[str, msgspec.Raw]] = []
    usage: Any = None
    error: Any = None  # of a server that reports one with status 200


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


class _PlainDelta(msgspec.Struct):
    content: str | None = None
    tool_calls: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None


class _PlainChoice(msgspec.Struct):
    delta: _PlainDelta
    index: int | None = None
    finish_reason: Any = None
    logprobs: Any = None


class PlainEvent(msgspec.Struct):
    """What most events of a stream are: a piece of one choice's text."""

    choices: list[_PlainChoice]
    usage: Any = None
    error: Any = None

    @property
    def text(self) -> str:
        """Empty if the event is anything else than text of one choice, with `usage` or without."""
        if len(self.choices) != 1 or self.error:
            return ""
        choice = self.choices[0]
        delta = choice.delta
        if (
            choice.finish_reason is not None
            or choice.logprobs is not None
            or delta.tool_calls
            or delta.reasoning_content
            or delta.reasoning
            or delta.refusal
        ):
            return ""
        return delta.content or ""


class _PlainMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None


class _AnsweredChoice(msgspec.Struct):
    message: _PlainMessage
    index: int | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _PlainAnswer(msgspec.Struct):
    """What most whole answers are: the text of one choice."""

    choices: tuple[_AnsweredChoice]
    usage: Any = None
    error: Any = None


class _Embedding(msgspec.Struct):
    index: int
    embedding: msgspec.Raw  # passed on as it is where the client asked for the same format


class Embeddings(msgspec.Struct):
    data: list[_Embedding] = []
    usage: Any = None
    error: Any = None


# These leave the parts that may be many unparsed: a call of a parser holds the interpreter's lock.
completion_decoder = msgspec.json.Decoder(Completion)
_logprobs_decoder = msgspec.json.Decoder(_Logprobs)
embeddings_decoder = msgspec.json.Decoder(Embeddings)
plain_event_decoder = msgspec.json.Decoder(PlainEvent)
plain_events_decoder = msgspec.json.Decoder(list[PlainEvent])
plain_answer_decoder = msgspec.json.Decoder(_PlainAnswer)


def choice_of(fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """One of `Completion.choices`, parsed."""
    logprobs = fields.pop("logprobs", None)
    choice = {name: loads(memoryview(raw)) for name, raw in fields.items()}
    if logprobs is not None and bytes(logprobs) != b"null":
        listed = _logprobs_decoder.decode(logprobs).content or ()
        choice["logprobs"] = {"content": [loads(memoryview(each)) for each in listed]}
    return choice
