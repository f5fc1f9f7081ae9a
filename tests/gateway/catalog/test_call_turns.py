"""Turns that call tools, on templates that are written as those of ten model families are: what the
model reads stands here by hand, and transformers renders the same from the form that the family
documents."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.tokenizing import load_codec
from gateway.formats.chat.request import parse_chat
from gateway.formats.responses.request import parse_responses
from gateway.prompts.rendering import render_chat

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CITY = '{"city": "Bern"}'
_EACH = "{% for m in messages %}"
_OTHERS = "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"

# (template, the call's turn as the model reads it, whether null content and objects are the form)
FAMILIES: dict[str, tuple[str, str, bool, bool]] = {
    # Joins the content to a string, and does not know calls.
    "smollm": (
        _EACH + "{{ '<' + m['role'] + '>' + m['content'] + '</>' }}{% endfor %}",
        "<assistant></>",
        False,
        True,
    ),
    "chatml prints": (
        _EACH + "<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}</>"
        "{% endfor %}",
        f'<assistant><call>{{"name": "weather", "arguments": {CITY}}}</call></>',
        False,
        True,
    ),
    "qwen": (
        _EACH
        + "{% if m.content is string %}{% set text = m.content %}{% else %}{% set text = '' %}"
        "{% endif %}<{{ m.role }}>{{ text }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        "<call>{{ f.name }}:{% if f.arguments is string %}{{ f.arguments }}"
        "{% else %}{{ f.arguments | tojson }}{% endif %}</call>{% endfor %}{% endfor %}",
        f"<assistant><call>weather:{CITY}</call>",
        True,
        True,
    ),
    "hermes": (
        _EACH + "{% if m.tool_calls is defined and m.tool_calls %}[{{ m.role }}]"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}"
        "|{{ c.function.name }}</tool_call>{% endfor %}{% else %}" + _OTHERS,
        f"[assistant]<tool_call>{CITY}|weather</tool_call>",
        True,
        True,
    ),
    "llama": (
        _EACH + "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at a time') }}{% endif %}{% set f = m.tool_calls[0].function %}"
        '[assistant]{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
        "{% else %}" + _OTHERS,
        f'[assistant]{{"name": "weather", "parameters": {CITY}}}',
        True,
        True,
    ),
    "mistral": (
        _EACH + "{% if m.tool_calls is defined and m.tool_calls is not none %}"
        "{% if m.content is not none and m.content | length == 0 %}"
        "{{ raise_exception('empty content') }}{% endif %}"
        "[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}#{{ c.id }}{% endfor %}"
        "{% else %}" + _OTHERS,
        f'[TOOL_CALLS]{{"name": "weather", "arguments": {CITY}}}#call_1abc',
        True,
        True,
    ),
    # Takes null for a turn of calls, whose arguments it joins as text.
    "deepseek": (
        _EACH + "{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for c in m['tool_calls'] %}{{ '<|c|>' + c['function']['name'] + '<|a|>' "
        "+ c['function']['arguments'] + '<|e|>' }}{% endfor %}{% else %}" + _OTHERS,
        f"<|c|>weather<|a|>{CITY}<|e|>",
        True,
        False,
    ),
    "glm": (
        _EACH + "{% if m.tool_calls %}[assistant]{{ '' + m.content }}{% for c in m.tool_calls %}"
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>{% endfor %}"
        "{% else %}" + _OTHERS,
        "[assistant]<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>",
        False,
        True,
    ),
    "granite prints text": (
        _EACH + "[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<|tool_call|>{{ c.function.name }} {{ c.function.arguments }}{% endfor %}{% endfor %}",
        f"[assistant]<|tool_call|>weather {CITY}",
        True,
        False,
    ),
    "command": (
        _EACH + "{% if m.role == 'assistant' and m.tool_calls %}<plan>{{ m.content | trim }}</plan>"
        '{% for c in m.tool_calls %}{"tool_name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}{% else %}' + _OTHERS,
        f'<plan></plan>{{"tool_name": "weather", "parameters": {CITY}}}',
        False,
        True,
    ),
}
CALL = {"id": "call_1abc", "type": "function"}
CHAT: Any = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": {}}]},
    {"role": "tool", "tool_call_id": "call_1abc", "content": "sunny"},
]


def chat_with(arguments: Any, content: str | None) -> list[dict[str, Any]]:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    return [CHAT[0], {"role": "assistant", "content": content, "tool_calls": [call]}, CHAT[2]]


def text_of(tmp_path: Path, source: str, messages: list[dict[str, Any]]) -> str:
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return render_chat("m", messages, None, load_codec(tmp_path)).text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_of_calls_is_what_the_family_reads(tmp_path: Path, family: str) -> None:
    source, expected, null, objects = FAMILIES[family]
    body = {"model": "m", "messages": chat_with(CITY, None), "tools": TOOLS}
    messages = parse_chat(json.dumps(body).encode()).messages
    assert messages is not None
    ours = text_of(tmp_path, source, messages)
    assert expected in ours and "sunny" in ours and "None" not in ours
    documented = chat_with(json.loads(CITY) if objects else CITY, None if null else "")
    rendered: Any = render_jinja_template([documented], chat_template=source)
    assert ours == rendered[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_and_its_output_on_responses_are_the_same_turn(tmp_path: Path, family: str) -> None:
    source, expected, _, _ = FAMILIES[family]
    called = {"type": "function_call", "call_id": "call_1abc", "name": "weather", "arguments": CITY}
    output = {"type": "function_call_output", "call_id": "call_1abc", "output": "sunny"}
    body = {"model": "m", "input": [CHAT[0], called, output]}
    messages = parse_responses(json.dumps(body).encode()).messages
    assert messages is not None
    assert expected in text_of(tmp_path, source, messages)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "5"])
def test_arguments_that_are_no_object_are_no_server_error(tmp_path: Path, arguments: str) -> None:
    source, *_ = FAMILIES["qwen"]
    assert "weather" in text_of(tmp_path, source, chat_with(arguments, None))
