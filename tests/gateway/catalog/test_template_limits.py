"""A chat template ends within bounds of time and memory, whatever it is; and off the event loop."""

import asyncio
import resource
import time
from typing import Any

import pytest

from core.errors import BadRequest, SettingError
from gateway.catalog.codec.template_limits import RenderingTakesLong
from gateway.catalog.codec.templates import ChatTemplate

PROTECTS = ("gateway/catalog/codec", "gateway/prompts")

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
DOUBLED = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested lists": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "a lazy filter": "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}"
    "{% endfor %}",
    "a long constant": "{{ ('a' * 10**9) | length }}",
    "a long list": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set n = namespace(x=3) %}"
    "{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a centred text": "{{ 'a' | center(10**9) }}",
    "a justified text": "{{ 'a'.ljust(10**9) }}",
    "a width": "{{ '{:>1000000000}'.format('a') }}",
    "a width of an argument": "{{ '{:>{}}'.format('a', 10**9) }}",
    "a width of percent": "{{ '%1000000000d' % 1 }}",
    "a width of the filter": "{{ '%1000000000d' | format(1) }}",
    "replaced": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replaced by the filter": "{{ ('a' * 10**6) | replace('', 'b' * 10**6) }}",
    "joined": "{{ ('b' * 10**6).join('a' * 10**6) }}",
    "joined by the filter": "{{ ('a' * 10**6) | join('b' * 10**6) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "doubled": DOUBLED + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added": DOUBLED + "{% set n.x = n.x + n.x %}{% endfor %}",
    "a list of lists": DOUBLED + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a block": DOUBLED + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "written": "{% for i in range(99999) %}{% for j in range(99999) %}" + "a" * 9999,
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "two calls of itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}"
    "{{ f(60) }}",
    "lorem ipsum": "{{ lipsum(n=10**9) }}",
    "indented": "{{ messages | tojson(indent=10**9) }}",
}
HOSTILE["written"] += "{% endfor %}{% endfor %}"


def refused(name: str) -> tuple[float, float]:
    """Seconds of the processor and KiB of memory that the refusal took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    with pytest.raises(BadRequest):
        ChatTemplate(HOSTILE[name] + "{{ messages[0].content }}", {}).render(CHAT)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return time.thread_time() - began, after - before


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_on_an_event_loop_a_hostile_template_is_refused_early(name: str) -> None:
    async def _refused() -> tuple[float, float]:
        return refused(name)

    seconds, memory = asyncio.run(_refused())
    assert seconds < 1 and memory < 100_000


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_in_a_thread_a_hostile_template_is_refused_within_bounds(name: str) -> None:
    seconds, memory = refused(name)
    assert seconds < 15 and memory < 1_000_000


LONG = "{% for i in range(30000) %}{% set x = i %}{% endfor %}{{ messages[0].content }}"


def test_a_long_rendering_leaves_the_event_loop_and_is_done_in_a_thread() -> None:
    template = ChatTemplate(LONG, {})

    async def _render() -> str:
        with pytest.raises(RenderingTakesLong):
            template.render(CHAT)
        return await asyncio.to_thread(template.render, CHAT)

    assert asyncio.run(_render()) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ [messages] | map(attribute='__class__') | list }}",
        "{{ messages | attr('__class__') }}",
        "{{ [''] | map('attr', '__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ('{0.__class__}' | attr('format'))(1) }}",
        "{{ [1] | groupby('__class__') }}",
    ],
)
def test_the_sandbox_holds_within_filters(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(CHAT)
    except BadRequest:
        return
    assert "class" not in text


@pytest.mark.parametrize(
    "source", ["{{ 1 + }}", "{% break %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"]
)
def test_a_template_that_cannot_be_compiled_is_named(source: str) -> None:
    with pytest.raises(SettingError, match="does not parse"):
        ChatTemplate(source, {})
