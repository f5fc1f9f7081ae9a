"""Chat templates in every form that is published. The oracle is transformers' own rendering."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import BadRequest, SettingError
from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.templates import ChatTemplate
from gateway.catalog.codec.tokenizing import TextCodec, load_codec
from gateway.prompts.rendering import render_chat

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <b>"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"b": 1, "a": "é<"}}}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
WITH_TOOLS = "tools: {{ tools | tojson }}\n" + PLAIN
GENERATION = """{%- set mark = 'outside' -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{% generation %}{%- set mark = 'inside' -%}<{{ m.content }}>{% endgeneration %}
{%- else -%}
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{{ mark }}"""


def theirs(source: str, tools: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    rendered: Any = render_jinja_template(
        [CHAT], tools=tools, chat_template=source, add_generation_prompt=True, **variables
    )
    return str(rendered[0][0])


@pytest.mark.parametrize(
    "source",
    [
        PLAIN,
        WITH_TOOLS,
        GENERATION,
        "{% macro say(m, end) %}{{ m.content.strip() }}{{ end }}{% endmacro %}"
        "{% for m in messages %}{% if m.content.startswith('H') and m.get('role') != 'x' %}"
        "{{ '%s:' | format(m.role) }}{{ say(m, end='!') }}{% for k, v in m.items() %}{{ k.upper() }}"
        "{{ loop.index }}{% if not loop.last %}, {% endif %}{% endfor %}"
        "{{ m.content.replace('l', 'L') ~ ','.join(m | map('upper')) }}"
        "{{ '{}-{n:>4}'.format(1, n=m.role) }}{{ m.content.split('e')[-1] * 2 }}{{ 7 % 4 }}{% endif %}"
        "{% set outer = loop %}{{ outer.index }}{% endfor %}{{ messages[::-1][0].role }}",
        "{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_is_rendered_as_transformers_does(source: str) -> None:
    assert ChatTemplate(source, {}).render(CHAT, tools=TOOLS) == theirs(source, TOOLS)


def model_dir(tmp_path: Path, template: Any = None, **files: str) -> Path:
    shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path)
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    return tmp_path


def text_of(codec: TextCodec, **given: Any) -> str:
    assert codec.template is not None
    return codec.template.render(CHAT, **given)


def test_named_templates_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
    codec = load_codec(model_dir(tmp_path, named))
    assert text_of(codec) == theirs(PLAIN)
    assert text_of(codec, tools=TOOLS) == theirs(WITH_TOOLS, TOOLS)


def test_the_tool_template_is_used_for_a_chat_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
    codec = load_codec(model_dir(tmp_path, named))
    assert render_chat("m", CHAT, TOOLS, codec).text == theirs(WITH_TOOLS, TOOLS)


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    codec = load_codec(model_dir(tmp_path, "from the configuration", chat_template=PLAIN))
    assert text_of(codec) == theirs(PLAIN)


def test_further_template_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    codec = load_codec(model_dir(tmp_path, chat_template=PLAIN))
    assert text_of(codec, tools=TOOLS) == theirs(WITH_TOOLS, TOOLS)
    assert text_of(codec) == theirs(PLAIN)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "does not parse"),
        ([{"name": "rag", "template": PLAIN}], "rag"),
        ([{"name": "default"}], "chat_template"),
    ],
)
def test_a_broken_template_is_a_wrong_setting(tmp_path: Path, template: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        load_codec(model_dir(tmp_path, template))


THINKS = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"


def test_variables_reach_the_template() -> None:
    template = ChatTemplate(THINKS, {})
    assert template.render(CHAT, enable_thinking=False) == theirs(THINKS, enable_thinking=False)
    assert template.render(CHAT) == theirs(THINKS) != theirs(THINKS, enable_thinking=False)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "eos_token", "raise_exception", "range"]
)
def test_a_reserved_variable_is_refused_by_name(tmp_path: Path, name: str) -> None:
    codec = load_codec(model_dir(tmp_path, THINKS))
    with pytest.raises(BadRequest, match=f"may not set '{name}'"):
        render_chat("m", CHAT, None, codec, {name: "x"})


def test_a_control_token_in_a_variable_stays_text(tmp_path: Path) -> None:
    codec = load_codec(model_dir(tmp_path, "{{ note }}<|im_end|>"))
    (end,) = (codec.tokenizer.token_to_id("<|im_end|>"),)
    ids = render_chat("m", CHAT, None, codec, {"note": "a<|im_end|>b"}).ids()
    assert ids.count(end) == 1 and ids[-1] == end
    assert codec.tokenizer.decode(ids[:-1]) == "a<|im_end|>b"
