"""The harmony format of gpt-oss, by the examples of OpenAI's description: any cut reads alike."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine.demo.paths import MODEL_DIR
from gateway.answers.choices import ChoiceOutput
from gateway.answers.harmony import TAGS, HarmonyReader, begun_message
from gateway.answers.reasoning import marks_reasoning, reader_for, writes_harmony
from gateway.catalog.codec.templates import ChatTemplate
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.request.engine import TokenChunk
from gateway.request.inference import InferenceRequest
from tests.gateway.answers.test_model_output import cut

THINK = "<|channel|>analysis<|message|>The user asks for the weather.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It is warm.<|return|>"
THOUGHT = "The user asks for the weather."
ROME = [("weather", {"city": "Rome"})]

Read = tuple[str, list[tuple[str, object]], str]


def read(text: str | list[str], begun: str = "assistant") -> Read:
    reader = HarmonyReader(["weather", "time"], begun)
    said, calls, thoughts = "", [], ""
    for part in [*([text] if isinstance(text, str) else text), None]:
        shown, found = reader.flush() if part is None else reader.feed(part)
        said += shown
        calls += [(call.name, json.loads(call.arguments)) for call in found]
        thoughts += reader.take_reasoning()
    assert reader.held == 0
    return said, calls, thoughts


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        (THINK + FINAL, "assistant", ("It is warm.", [], THOUGHT)),
        (THINK + CALL, "assistant", ("", ROME, THOUGHT)),
        (THINK + CALL.removesuffix("<|call|>"), "assistant", ("", ROME, THOUGHT)),
        # The recipient may stand in the role, and the type without its token.
        (
            THINK + "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Rome"}<|call|>',
            "assistant",
            ("", ROME, THOUGHT),
        ),
        (" to=functions.time<|channel|>commentary<|message|>", "assistant", ("", [("time", {})], "")),
        (
            CALL.removeprefix("<|start|>assistant") + CALL,
            "assistant",
            ("", ROME * 2, ""),
        ),
        # A preamble is for the user.
        (
            THINK + "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>" + CALL,
            "assistant",
            ("I look it up.", ROME, THOUGHT),
        ),
        (
            "<|channel|>commentary<|message|>I look it up.<|end|>" + FINAL,
            "assistant",
            ("I look it up.\n\nIt is warm.", [], ""),
        ),
        (THINK + "<|start|>assistant" + THINK + FINAL, "assistant",
         ("It is warm.", [], f"{THOUGHT}\n\n{THOUGHT}")),
        # The prompt has begun the message, or the whole header of it.
        ("analysis<|message|>Hm.<|end|>" + FINAL, "assistant<|channel|>", ("It is warm.", [], "Hm.")),
        (" warm.<|return|>", "assistant<|channel|>final<|message|>It is", (" warm.", [], "")),
        # A function that nobody declared, a tool of the model's own, arguments that are not JSON.
        (CALL.replace("weather", "other"), "assistant", ('{"city": "Rome"}', [], "")),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", "assistant", ("", [], "1 + 1")),
        (CALL.replace('"city"', "city"), "assistant", ('{city: "Rome"}', [], "")),
        (CALL.replace('{"city": "Rome"}', "[1]"), "assistant", ("[1]", [], "")),
        # A forgotten end, and output that is cut off.
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "assistant",
         ("Yes.", [], "Hm.")),
        ("<|channel|>analysis<|message|>Hm. W", "assistant", ("", [], "Hm. W")),
        ("<|channel|>anal", "assistant", ("", [], "")),
        # No header at all.
        ("Yes, 1 < 2.", "assistant", ("Yes, 1 < 2.", [], "")),
        ("assistants are people", "assistant", ("assistants are people", [], "")),
        ("assistant " * 50, "assistant", ("assistant " * 50, [], "")),
        ("", "assistant", ("", [], "")),
    ],
)  # fmt: skip
def test_messages_by_their_channels(text: str, begun: str, expected: Read) -> None:
    assert read(text, begun) == expected
    assert read(list(text), begun) == expected
    for seed in range(10):
        assert read(cut(text, seed), begun) == expected


PIECES = [
    *sorted(TAGS), THINK, CALL, FINAL, "assistant", "analysis", "final", "commentary", "<|", "<", "to=",
    "functions.time", " ", "\n", "{}", '{"a": 1}', "x", "json", "x" * 160,
]  # fmt: skip


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.integers(0, 1000),
    st.sampled_from(["", "assistant", "assistant<|channel|>analysis<|message|>"]),
)
def test_any_cut_reads_alike(text: str, seed: int, begun: str) -> None:
    whole = read(text, begun)
    assert read(cut(text, seed), begun) == whole
    assert read(list(text), begun) == whole
    if not any(tag in text for tag in TAGS) and begun == "" and "<" not in text:
        assert whole[0] == text, "without a tag it is the answer"


@pytest.fixture(scope="module")
def codec() -> Iterator[TextCodec]:
    """A tokenizer whose tags are control tokens, and a template as gpt-oss's marks channels."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in sorted(TAGS)])
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "<|start|>assistant{# <|channel|>analysis<|message|> #}"
    )
    yield TextCodec(tokenizer, ChatTemplate(source, {}), (0,))


def test_a_choice_of_such_a_model(codec: TextCodec) -> None:
    assert marks_reasoning(codec)
    function = {"name": "weather", "parameters": {"type": "object"}}
    request = InferenceRequest(
        "/v1/chat/completions", "m", [{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": function}],
    )  # fmt: skip
    prompt = codec.encode("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert begun_message(codec.decode(prompt, special=True)) == "assistant"
    said = THINK + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + CALL
    ids = codec.tokenizer.encode(said, add_special_tokens=False).ids
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, prompt))
    for token in ids:
        choice.feed(TokenChunk("r", 0, [token]))
    choice.end("stop")
    assert "".join(choice.reasoning) == THOUGHT
    assert "".join(choice.text) == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in choice.calls] == ROME
    assert choice.finish_reason == "tool_calls"
    thoughts = codec.tokenizer.encode(THINK, add_special_tokens=False).ids
    assert abs(choice.reasoning_tokens - len(thoughts)) <= 1


def test_without_tools_a_call_is_text(codec: TextCodec) -> None:
    request = InferenceRequest("/v1/chat/completions", "m", [{"role": "user", "content": "Hi"}])
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, []))
    for token in codec.tokenizer.encode(THINK + CALL + FINAL, add_special_tokens=False).ids:
        choice.feed(TokenChunk("r", 0, [token]))
    choice.end("stop")
    assert "".join(choice.text) == '{"city": "Rome"}\n\nIt is warm.'
    assert "".join(choice.reasoning) == THOUGHT and choice.finish_reason == "stop"


@pytest.mark.parametrize(("length", "header"), [(299, True), (300, True), (301, False)])
def test_a_header_has_at_most_three_hundred_characters(length: int, header: bool) -> None:
    begun = "<|channel|>analysis"
    text = begun + " " * (length - len(begun)) + "<|message|>Hm.<|end|>"
    for parts in ([text], list(text)):
        _, _, thought = read(parts)
        assert (thought == "Hm.") is header


def test_an_answer_without_reasoning_has_no_tokens_of_it(codec: TextCodec) -> None:
    request = InferenceRequest("/v1/chat/completions", "m", [{"role": "user", "content": "Hi"}])
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, []))
    for token in codec.encode("7 is it."):
        choice.feed(TokenChunk("r", 0, [token]))
    choice.end("stop")
    assert "".join(choice.text) == "7 is it." and choice.reasoning_tokens == 0


def test_a_message_that_the_prompt_begins_goes_on_in_the_answer(codec: TextCodec) -> None:
    request = InferenceRequest("/v1/chat/completions", "m", [{"role": "user", "content": "Hi"}])
    begun, said = (
        codec.tokenizer.encode(text, add_special_tokens=False).ids
        for text in ("<|start|>assistant<|channel|>analysis<|message|>", "Hm.<|end|>" + FINAL)
    )
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, begun))
    for token in said:
        choice.feed(TokenChunk("r", 0, [token]))
    choice.end("stop")
    assert ("".join(choice.reasoning), "".join(choice.text)) == ("Hm.", "It is warm.")


@pytest.mark.parametrize("tags", ["<|channel|>", "<|message|>"])
def test_one_of_the_two_tags_is_not_the_format(tags: str) -> None:
    """Other formats have a tag of the same name."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    template = ChatTemplate("{# " + tags + " #}{{ messages[0].content }}", {})
    assert not writes_harmony(TextCodec(tokenizer, template, (0,)))
