"""One choice, chunk by chunk: what the client gets at once, and what counts as delivered."""

import json
from typing import Any

import pytest

from engine.demo.paths import MODEL_DIR
from engine.protocol import FinishReason, PromptLogprob, TokenChunk, TokenLogprob
from gateway.answers.choices import ChoiceOutput
from gateway.answers.reasoning import OutputReader, ReasoningReader
from gateway.answers.tool_calls import ToolReader
from gateway.catalog.codec.tokenizing import load_codec
from gateway.request.engine import TextChunk
from gateway.screening.tenant_moderator import ChoiceGuard, GuardedResponse
from moderation.guard import StreamGuard
from moderation.policy import Policy
from moderation.screener import Screener

CODEC = load_codec(MODEL_DIR)
CALL = '<tool_call>{"name": "send", "arguments": {"to": "Ada"}}</tool_call>'


def guard(action: str, cut_paid_by: str = "tenant") -> ChoiceGuard:
    """Of a policy that knows one secret word."""
    rule = {"name": "secret", "pattern": "swordfish", "longest": 9, "action": action}
    policy = Policy.from_dict({"output": {"patterns": [rule]}, "cut_output_paid_by": cut_paid_by})
    stream = StreamGuard(policy, Screener())
    return ChoiceGuard(GuardedResponse(stream, policy, lambda _verdict, _text: None), 0)


def tools() -> OutputReader:
    return OutputReader(ToolReader(["send"]))


def call(to: str) -> str:
    """A call whose argument is spelled with escapes, which the guard of the stream cannot read."""
    spelled = "".join(f"\\u{ord(each):04x}" for each in to)
    return f'<tool_call>{{"name": "send", "arguments": {{"to": "{spelled}"}}}}</tool_call>'


def one_chunk(*texts: str) -> tuple[TokenChunk, int]:
    """All texts in a chunk of tokens, and how many tokens the first text has."""
    ids = [CODEC.encode(each) for each in texts]
    return TokenChunk("r", 0, [token for each in ids for token in each]), len(ids[0])


def sent(choice: ChoiceOutput) -> int:
    choice.take()
    choice.sent()
    return choice.delivered


def test_a_tool_call_is_passed_on_when_it_is_complete_and_not_at_the_end() -> None:
    choice = ChoiceOutput(0, None, reader=tools())
    choice.feed(TextChunk("r", 0, CALL, 9))
    delta = choice.take()
    assert delta is not None and delta.finish_reason is None and delta.text == ""
    assert [json.loads(each.arguments) for each in delta.calls] == [{"to": "Ada"}]


def test_reasoning_is_passed_on_while_it_goes_on() -> None:
    thoughts = ReasoningReader(("<think>", "</think>"), begun=True)
    choice = ChoiceOutput(0, None, reader=OutputReader(None, thoughts))
    choice.feed(TextChunk("r", 0, "I think", 2))
    delta = choice.take()
    assert delta is not None and (delta.reasoning, delta.text) == ("I think", "")


def test_log_probabilities_come_with_the_text_of_their_tokens() -> None:
    choice = ChoiceOutput(0, CODEC)
    (token,) = CODEC.encode("a")
    choice.feed(TokenChunk("r", 0, [token], [TokenLogprob(token, -0.5)]))
    delta = choice.take()
    assert delta is not None and delta.logprobs == [TokenLogprob(token, -0.5)]


def test_an_engine_has_ended_when_it_says_so() -> None:
    """Otherwise it is told to stop."""
    choice = ChoiceOutput(0, CODEC)
    chunk, _ = one_chunk("Hello")
    choice.feed(chunk)
    assert not choice.ended_by_engine
    choice.feed(TokenChunk("r", 0, [], finish_reason=FinishReason.LENGTH))
    assert choice.ended_by_engine and choice.finish_reason == "length"


def test_parts_of_a_call_wait_until_it_is_complete() -> None:
    choice = ChoiceOutput(0, None, reader=tools())
    assert choice.waiting == 0
    piece: dict[str, Any] = {"index": 0, "id": "c", "function": {"name": "send", "arguments": "{}"}}
    choice.feed(TextChunk("r", 0, "", 1, calls=[piece]))
    assert choice.waiting > 0 and choice.take() is None
    choice.feed(TextChunk("r", 0, "", 0, "tool_calls"))
    assert choice.waiting == 0 and [each.name for each in choice.calls] == ["send"]


def test_a_piece_without_an_index_belongs_to_the_first_call() -> None:
    choice = ChoiceOutput(0, None, reader=tools())
    begun = {"index": 0, "id": "c", "function": {"name": "send", "arguments": '{"to":'}}
    rest = {"function": {"arguments": ' "Ada"}'}}
    choice.feed(TextChunk("r", 0, "", 1, calls=[begun]))
    choice.feed(TextChunk("r", 0, "", 1, "tool_calls", calls=[rest]))
    assert [json.loads(each.arguments) for each in choice.calls] == [{"to": "Ada"}]


@pytest.mark.parametrize(("guarded", "listed"), [(True, "Hello"), (False, "Hello END")])
def test_log_probabilities_of_a_stop_string_are_not_shown_past_a_guard(
    guarded: bool, listed: str
) -> None:
    """The guard never saw that text."""
    choice = ChoiceOutput(0, CODEC, stops=("END",), guard=guard("redact") if guarded else None)
    chunk, _ = one_chunk("Hello END")
    scored = [TokenLogprob(token, -0.5) for token in chunk.tokens]
    choice.feed(TokenChunk("r", 0, chunk.tokens, scored))
    shown = choice.take()
    assert shown is not None and shown.text == "Hello "
    assert "".join(CODEC.token_text(each.token) for each in shown.logprobs) == listed


def test_tokens_after_a_stop_string_in_one_chunk_are_not_charged() -> None:
    choice = ChoiceOutput(0, CODEC, stops=("END",))
    chunk, billed = one_chunk("Hello END", " and much more text that nobody reads")
    choice.feed(chunk)
    assert "".join(choice.text) == "Hello " and choice.finish_reason == "stop"
    assert sent(choice) == billed and choice.received == len(chunk.tokens) > billed


def test_tokens_after_the_one_call_that_was_asked_for_are_neither_sent_nor_charged() -> None:
    choice = ChoiceOutput(0, CODEC, reader=tools(), single_tool_call=True)
    chunk, billed = one_chunk(CALL, " Done, and here is another one: " + CALL)
    choice.feed(chunk)
    assert len(choice.calls) == 1 and choice.finish_reason == "tool_calls"
    assert choice.text == [] and sent(choice) == billed


def test_a_call_that_the_guard_blocks_ends_the_choice() -> None:
    choice = ChoiceOutput(0, CODEC, guard=guard("block"), reader=tools())
    chunk, _ = one_chunk(call("swordfish"), " Done. " * 30)
    choice.feed(chunk)
    assert choice.finish_reason == "content_filter"
    assert choice.calls == [] and choice.text == []
    choice.feed(TokenChunk("r", 0, CODEC.encode(" More."), finish_reason=FinishReason.STOP))
    assert choice.finish_reason == "content_filter" and choice.text == []


def test_a_call_that_the_guard_blocks_at_the_end_is_a_cut_of_the_guard() -> None:
    judge = guard("block")
    choice = ChoiceOutput(0, None, guard=judge, reader=tools())
    choice.feed(TextChunk("r", 0, call("swordfish") + call("Ada"), 9, "stop"))
    assert choice.finish_reason == "content_filter"
    assert judge.blocked and judge.action == "block"


def test_what_is_removed_from_a_call_is_in_the_verdict() -> None:
    judge = guard("redact")
    choice = ChoiceOutput(0, None, guard=judge, reader=tools())
    choice.feed(TextChunk("r", 0, call("swordfish"), 9, "stop"))
    assert [json.loads(each.arguments) for each in choice.calls] == [{"to": "[PATTERN]"}]
    assert judge.action == "redact" and not judge.blocked


@pytest.mark.parametrize("blocked", [True, False])
def test_an_end_that_the_guard_blocks_is_a_cut(blocked: bool) -> None:
    choice = ChoiceOutput(0, None, guard=guard("block"))
    choice.feed(TextChunk("r", 0, "It is swordfish" if blocked else "It is a fish", 4, "stop"))
    assert choice.finish_reason == ("content_filter" if blocked else "stop")
    assert ("swordfish" in "".join(choice.text)) is False


class Asking:
    """A guard that holds everything and asks a second opinion at the end."""

    blocked = False
    action: str | None = None
    needs_second_opinion = undecided = True
    spare = 0
    needed, cut_paid_by, cuts = 1, "tenant", ()

    def __init__(self, blocks: bool) -> None:
        self._blocks = blocks
        self._text = ""

    @property
    def held(self) -> int:
        return len(self._text)

    def clean(self, text: str, *, record: bool = False) -> str | None:
        return text

    def feed(self, text: str, *, last: bool = False) -> str:
        self._text += text
        return ""

    def flush(self) -> str:
        return ""

    async def decide(self) -> str:
        self.blocked, self.undecided = self._blocks, False
        released, self._text = "" if self._blocks else self._text, ""
        return released

    def over(self) -> None:
        return


@pytest.mark.parametrize("blocks", [True, False])
async def test_a_choice_waits_for_a_second_opinion(blocks: bool) -> None:
    choice = ChoiceOutput(0, CODEC, guard=Asking(blocks))
    chunk, count = one_chunk("It is a fish.")
    choice.feed(chunk)
    await choice.resolve()
    assert choice.take() is None and not choice.over, "it has not ended"
    choice.end(FinishReason.LENGTH)
    assert choice.over and choice.finish_reason is None and sent(choice) == 0
    await choice.resolve()
    delta = choice.take()
    choice.sent()
    assert delta is not None
    if blocks:
        assert (delta.text, delta.finish_reason, choice.delivered) == ("", "content_filter", 0)
    else:
        assert (delta.text, delta.finish_reason) == ("It is a fish.", "length")
        assert choice.delivered == count


def single_tokens(*texts: str) -> list[int]:
    ids = [CODEC.encode(each) for each in texts]
    return [each[0] for each in ids]


def test_alternatives_that_the_guard_would_remove_are_no_part_of_an_entry() -> None:
    plain, secret = single_tokens("a", "b")
    policy = Policy.from_dict(
        {"output": {"patterns": [{"name": "b", "pattern": "b", "longest": 1, "action": "redact"}]}}
    )
    answer = GuardedResponse(StreamGuard(policy, Screener()), policy, lambda _v, _t: None)
    choice = ChoiceOutput(0, CODEC, guard=ChoiceGuard(answer, 0))
    top = ((plain, -0.5), (secret, -1.0))
    choice.feed(
        TokenChunk(
            "r", 0, [plain], [TokenLogprob(plain, -0.5, top)], FinishReason.STOP,
            prompt_logprobs=[PromptLogprob(plain), PromptLogprob(plain, -0.5, 1, top)],
        )
    )  # fmt: skip
    delta = choice.take()
    assert delta is not None and delta.logprobs == [TokenLogprob(plain, -0.5, top[:1])]
    assert choice.prompt_logprobs == [
        PromptLogprob(plain), PromptLogprob(plain, -0.5, 1, top[:1])
    ]  # fmt: skip


def test_what_an_upstream_sends_after_the_end_is_counted_and_not_shown() -> None:
    choice = ChoiceOutput(0, None)
    choice.feed(TextChunk("r", 0, "a", 1, "stop"))
    choice.feed_run([TextChunk("r", 0, "bc", 1), TextChunk("r", 0, "d", 1)])
    assert choice.text == ["a"] and sent(choice) == 1
    assert (choice.generated, choice.received) == (1, 4)


def test_text_that_begins_no_stop_string_is_passed_on_at_once() -> None:
    choice = ChoiceOutput(0, CODEC, stops=("END",))
    chunk, count = one_chunk("Hello")
    choice.feed(chunk)
    delta = choice.take()
    assert delta is not None and (delta.text, delta.tokens) == ("Hello", count)


def test_tokens_of_text_that_may_begin_a_stop_string_are_not_delivered_yet() -> None:
    choice = ChoiceOutput(0, CODEC, stops=("END of it",))
    chunk, shown = one_chunk("Hello, this is shown", "END")
    choice.feed(chunk)
    assert sent(choice) == shown
    assert "".join(choice.text) == "Hello, this is shown" and choice.reasoning_tokens == 0


def test_a_model_without_reasoning_has_no_tokens_of_it() -> None:
    choice = ChoiceOutput(0, CODEC)
    choice.feed(TokenChunk("r", 0, CODEC.encode("7 is it.")))
    assert sent(choice) > 1 and choice.reasoning_tokens == 0


class Blocking(Asking):
    """Releases what was judged before the word that it blocks."""

    def feed(self, text: str, *, last: bool = False) -> str:
        before, found, _ = text.partition("swordfish")
        self.blocked = bool(found)
        return before


def test_what_was_judged_before_a_cut_is_sent_with_it() -> None:
    choice = ChoiceOutput(0, None, guard=Blocking(True))
    choice.feed(TextChunk("r", 0, "It is a swordfish.", 4))
    delta = choice.take()
    assert delta is not None and (delta.text, delta.finish_reason) == ("It is a ", "content_filter")


def test_no_stop_string_ends_the_text_of_the_first_tokens() -> None:
    """As vLLM has it: what comes before `min_tokens` is no part of a stop string."""
    text = "A toll is paid at a gate."
    ids = CODEC.encode(text)
    for least in (0, 5, len(ids)):
        choice = ChoiceOutput(0, CODEC, (" ",), min_tokens=least)
        for token in ids:
            if not choice.over:
                choice.feed(TokenChunk("r", 0, [token]))
        choice.end(FinishReason.LENGTH)
        free = CODEC.decode(ids[:least])
        rest = text[len(free) :]
        assert "".join(choice.text) == free + rest.split(" ")[0]
        assert (choice.stop_matched == " ") is (" " in rest)
