"""A chat that is put together of its turns is the text that the whole template renders."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.templates import ChatTemplate, _environment, turn_formats
from gateway.request.plain_messages import ROLES, PlainMessages, plain_messages

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DEMO = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())["chat_template"]
LOOP = "{% for m in messages %}"
BY_TURN = {
    "demo": DEMO,
    "zephyr": LOOP
    + "{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + eos_token }}"
    + "{% elif m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + eos_token }}"
    + "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + eos_token }}"
    + "{% endif %}\n{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "attributes": "{{ bos_token }}"
    + LOOP
    + "[{{ m.role if m.role != 'tool' else 'result' }}]{{ m.content or 'nothing' }}\n{% endfor %}end",
    "scope": LOOP
    + "{% generation %}{{ m.role ~ ': ' ~ m.content }}{% endgeneration %}{% endfor %}",
}
SILENT = {"zephyr": {"tool", "developer"}}  # roles whose texts a template does not write
AS_A_WHOLE = {
    "trimmed": LOOP + "{{ m.content | trim }}{% endfor %}",
    "numbered": LOOP + "{{ loop.index0 }}{{ m.content }}{% endfor %}",
    "its neighbour": LOOP + "{{ m.content }}{{ messages[0].role }}{% endfor %}",
    "compared": LOOP + "{% if m.content == 'b' %}B{% endif %}{{ m.content }}{% endfor %}",
    "measured": LOOP + "{{ m.content | length }}{{ m.content }}{% endfor %}",
    "a part of it": LOOP + "{{ m.content[0] }}{% endfor %}",
    "by character": LOOP + "{% for c in m.content %}{{ c }}.{% endfor %}{% endfor %}",
    "remembered": "{% set n = namespace(x='') %}"
    + LOOP
    + "{% set n.x = m.role %}{{ n.x ~ m.content }}{% endfor %}{{ n.x }}",
    "chosen": "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
    "other messages": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "none": LOOP + "{{ m.content }}{% else %}nothing{% endfor %}",
    "told of the first": "{{ messages[0].content }}" + LOOP + "{{ m.content }}{% endfor %}",
    "dated": "{{ strftime_now('%Y') }}" + LOOP + "{{ m.content }}{% endfor %}",
    "chance": "{{ [1, 2] | random }}" + LOOP + "{{ m.content }}{% endfor %}",
    "the whole message": LOOP + "{{ m }}{% endfor %}",
    "strict": LOOP
    + "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}",
    "twice": 2 * (LOOP + "{{ m.content }}{% endfor %}"),
}
chats = st.lists(
    st.tuples(st.sampled_from(sorted(ROLES)), st.text(max_size=8) | st.sampled_from(["b", " b\n"])),
    min_size=1,
    max_size=6,
)


def plain(chat: list[tuple[str, str]]) -> PlainMessages:
    found = plain_messages([{"role": role, "content": text} for role, text in chat])
    assert found is not None
    return found


@pytest.mark.parametrize("name", BY_TURN)
@settings(max_examples=100, deadline=None)
@given(chats, st.booleans())
def test_the_turns_are_those_of_the_whole(
    name: str, chat: list[tuple[str, str]], begins: bool
) -> None:
    template, messages = ChatTemplate(BY_TURN[name], TOKENS), plain(chat)
    whole = template.render(list(messages), add_generation_prompt=begins)
    assert template.render(messages, add_generation_prompt=begins) == whole
    formats = turn_formats(_environment(), BY_TURN[name], TOKENS)
    assert formats is not None
    written = formats.write(messages, begins_answer=begins)
    silent = SILENT.get(name, set()) & set(messages.roles)
    assert written == (whole if all(messages.texts) and not silent else None)


@pytest.mark.parametrize("name", AS_A_WHOLE)
def test_a_template_that_reads_more_is_rendered_as_a_whole(name: str) -> None:
    assert turn_formats(_environment(), AS_A_WHOLE[name], TOKENS) is None


def test_tools_and_variables_are_for_the_whole_template() -> None:
    source = "{{ tools }}{{ tone }}" + LOOP + "{{ m.content }}{% endfor %}"
    template, messages = ChatTemplate(source, TOKENS), plain([("user", "Hi")])
    assert template.render(messages) == "NoneHi"
    assert template.render(messages, tone="dry") == "NonedryHi"
    assert template.render(messages, tools=[{"a": 1}]) == "[{'a': 1}]Hi"
