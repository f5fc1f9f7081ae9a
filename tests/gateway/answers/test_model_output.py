"""Reasoning and tool calls in the form of each model family: any cut of the same output reads alike."""

import json
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from engine.demo.paths import MODEL_DIR
from gateway.answers.choices import ChoiceOutput
from gateway.answers.reasoning import OutputReader, ReasoningReader, reader_for
from gateway.answers.tool_calls import ToolReader
from gateway.catalog.codec.templates import ChatTemplate
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.request.engine import TokenChunk
from gateway.request.inference import InferenceRequest

ARGUMENTS = {"city": 'O\'Hara [x] "q"', "days": 3, "wet": True, "none": None}
JSON = json.dumps(ARGUMENTS)
OBJECT = json.dumps({"name": "weather", "arguments": ARGUMENTS})
PYTHON = """weather(city="O'Hara [x] \\"q\\"", days=3, wet=True, none=None)"""
DEEPSEEK_3 = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
CALLS = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama json": OBJECT,
    "llama tag": f"<|python_tag|>{OBJECT}",
    "llama list": f"[{PYTHON}]",
    "llama words": f"[{PYTHON.replace('True', 'true').replace('=None', '=null')}]",
    "llama 4": f"<|python_start|>[{PYTHON}]<|python_end|>",
    "mistral list": f"[TOOL_CALLS][{OBJECT}]",
    "mistral spaced": f"[TOOL_CALLS] [ {OBJECT} ]",
    "mistral name": f"[TOOL_CALLS]weather{JSON}",
    "mistral args": f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "mistral id": f"[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{JSON}",
    "deepseek 3": f"<｜tool▁calls▁begin｜>{DEEPSEEK_3}<｜tool▁calls▁end｜>",
    "deepseek 3.1": f"<｜tool▁calls▁begin｜>{DEEPSEEK_31}<｜tool▁calls▁end｜>",
}
TWO = {
    "llama list": f"[{PYTHON}, time(), {PYTHON}]",
    "mistral args": f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]time[ARGS]{{}}"
    f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "deepseek 3": "<｜tool▁calls▁begin｜>" + DEEPSEEK_3 + "\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>"
    + "\n" + DEEPSEEK_3 + "<｜tool▁calls▁end｜>",
}  # fmt: skip
NO_CALLS = [
    "[TOOL_CALLS] is a token of Mistral's, and nobody reads further." + "x" * 300,
    "[weather(1)]",
    "[weather(city=open('x'))]",
    "[weather(city=x)]",
    "[weather(**{'city': 'Rome'})]",
    "[1, 2, 3]",
    "[wea",
    "[TOOL",
    "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>",
    "<|python_tag|>print(1)",
    '[TOOL_CALLS]unknown[ARGS]{"a": 1}',
    '[weather(city="\\d")',
]


def read(
    reader: OutputReader | ToolReader, parts: list[str]
) -> tuple[str, list[tuple[str, str]], str]:
    said, calls, thoughts = "", [], ""
    for part in [*parts, None]:
        text, found = reader.flush() if part is None else reader.feed(part)
        said += text
        calls += [(call.name, call.arguments) for call in found]
        thoughts += reader.take_reasoning() if isinstance(reader, OutputReader) else ""
    return said, calls, thoughts


def cut(text: str, seed: int) -> list[str]:
    dice = random.Random(seed)
    places = sorted(dice.sample(range(len(text) + 1), min(len(text), dice.randrange(0, 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def tools() -> ToolReader:
    return ToolReader(["weather", "time"])


@pytest.mark.parametrize("form", CALLS)
def test_a_call_of_each_family(form: str) -> None:
    for parts in ([CALLS[form]], list(CALLS[form]), *(cut(CALLS[form], n) for n in range(20))):
        said, calls, _ = read(tools(), parts)
        assert said == ""
        assert [(name, json.loads(given)) for name, given in calls] == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("form", TWO)
def test_several_calls_of_each_family(form: str) -> None:
    for parts in ([TWO[form]], list(TWO[form])):
        said, calls, _ = read(tools(), parts)
        assert said.strip() == ""
        assert [name for name, _ in calls] == ["weather", "time", "weather"]
        assert [json.loads(given) for _, given in calls] == [ARGUMENTS, {}, ARGUMENTS]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_stays_text(text: str) -> None:
    for parts in ([text], list(text)):
        assert read(tools(), parts) == (text, [], "")


PIECES = [
    *CALLS.values(), "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>", "[", "]",
    "{", "}", '"', "'", "weather", "(", ")", "<think>", "</think>", "<th", " ", "\n", "x", ";",
]  # fmt: skip


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(PIECES), max_size=7).map("".join),
    st.integers(0, 1000),
    st.sampled_from([None, True, False]),
)
def test_any_cut_reads_alike_and_loses_nothing(text: str, seed: int, begun: bool | None) -> None:
    def reader() -> OutputReader:
        tags = "<think>", "</think>"
        return OutputReader(tools(), None if begun is None else ReasoningReader(tags, begun=begun))

    whole = read(reader(), [text])
    assert read(reader(), cut(text, seed)) == whole
    assert read(reader(), list(text)) == whole
    if begun is None and not whole[1]:
        assert whole[0] == text
    if begun is not None and not whole[1]:
        left = text.replace("<think>", "", 1) if not begun and whole[2] else text
        left = left.replace("</think>", "", 1) if whole[0] or "</think>" in left else left
        kept = "".join((whole[2] + whole[0]).split())
        assert kept in ("".join(left.split()), "".join(text.split()))


@pytest.mark.parametrize(
    ("text", "begun", "thought", "answer"),
    [
        ("<think>\nHm. Well.\n</think>\n\nYes.", False, "Hm. Well.", "Yes."),
        ("\nHm.\n</think>\nYes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>cut off", False, "cut off", ""),
        ("Yes, <think> is a tag.", False, "", "Yes, <think> is a tag."),
        ("  Yes", False, "", "  Yes"),
        ("  ", False, "", "  "),
        ("<thi", False, "", "<thi"),
        (f"<think>a [b] c</think>\n<tool_call>{OBJECT}</tool_call>", False, "a [b] c", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(
    text: str, begun: bool, thought: str, answer: str
) -> None:
    for parts in ([text], list(text)):
        reader = OutputReader(tools(), ReasoningReader(("<think>", "</think>"), begun=begun))
        said, calls, reasoning = read(reader, parts)
        assert (reasoning, said, len(calls)) == (thought, answer, text.count("<tool_call>"))


@pytest.fixture(scope="module")
def codec() -> Iterator[TextCodec]:
    """A tokenizer whose tool and reasoning tags are control tokens, as Mistral's are."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    names = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[OTHER]"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    source = "{% for m in messages %}{{ m.content }}[THINK][/THINK]{% endfor %}"
    yield TextCodec(tokenizer, ChatTemplate(source, {}), (0,))


def test_control_tokens_of_a_form_are_read(codec: TextCodec) -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    request = InferenceRequest(
        "/v1/chat/completions", "m", [{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": function}],
    )  # fmt: skip
    said = f"[THINK]Let me look.[/THINK][OTHER]Look: [TOOL_CALLS]weather[ARGS]{JSON}"
    ids = codec.tokenizer.encode(said, add_special_tokens=False).ids
    assert codec.tokenizer.token_to_id("[ARGS]") in ids
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, [5, 6]))
    for token in ids:
        choice.feed(TokenChunk("r", 0, [token]))
    choice.end("stop")
    assert "".join(choice.reasoning) == "Let me look."
    assert "".join(choice.text) == "Look: "
    assert [json.loads(call.arguments) for call in choice.calls] == [ARGUMENTS]
    assert choice.finish_reason == "tool_calls"
    thoughts = codec.tokenizer.encode("[THINK]Let me look.[/THINK]", add_special_tokens=False).ids
    assert abs(choice.reasoning_tokens - len(thoughts)) <= 1
    fixed = replace(request, engine_parameters={"response_format": {"type": "json_object"}})
    assert "".join(_fed(codec, fixed, ids).reasoning) == ""


def test_reasoning_that_the_prompt_begins(codec: TextCodec) -> None:
    request = InferenceRequest("/v1/chat/completions", "m", [{"role": "user", "content": "Hi"}])
    said = codec.tokenizer.encode("Hm.[/THINK]Yes.", add_special_tokens=False).ids
    asked = codec.tokenizer.encode("Hi[THINK]", add_special_tokens=False).ids
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, asked))
    for token in said:
        choice.feed(TokenChunk("r", 0, [token]))
    choice.end("stop")
    assert ("".join(choice.reasoning), "".join(choice.text)) == ("Hm.", "Yes.")


def _fed(codec: TextCodec, request: InferenceRequest, ids: list[int]) -> ChoiceOutput:
    choice = ChoiceOutput(0, codec, reader=reader_for(request, codec, []))
    for token in ids:
        choice.feed(TokenChunk("r", 0, [token]))
    return choice


# (output, reasoning, answer)
BLOCKS = [
    ("<think>a</think>\n<think>b</think>C", "a\nb", "C"),
    ("<think>a</think>Hello\n<think>b</think>World", "a\nb", "Hello\nWorld"),
    (
        "<think>a</think>Hello\n  <think>b</think>\n<think>c</think>World",
        "a\nb\nc",
        "Hello\n  World",
    ),
    ("<think>a</think>Say <think> to me", "a", "Say <think> to me"),
    ("<think>a</think>x\n<thin", "a", "x\n<thin"),
    ("<think>a</think>x\n<think>b", "a\nb", "x\n"),
    ("Hi\n<think>b</think>!", "b", "Hi\n!"),
]


@pytest.mark.parametrize(("text", "reasoning", "answer"), BLOCKS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_further_reasoning_is_no_content(text: str, reasoning: str, answer: str, size: int) -> None:
    reader = ReasoningReader(("<think>", "</think>"), begun=False)
    pieces = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.flush())
    assert "".join(thought for thought, _ in pieces) == reasoning
    assert "".join(said for _, said in pieces) == answer


def test_the_reasoning_that_is_counted_ends_where_the_answer_begins() -> None:
    reader = ReasoningReader(("<think>", "</think>"), begun=False)
    reader.feed("<think>a</think>x\n<think>b")
    assert reader.end == len("<think>a</think>")
