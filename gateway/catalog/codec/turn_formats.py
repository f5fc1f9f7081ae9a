"""Chat templates that write each turn by itself: its text as it is, between two strings of its role.

Whether a template does, its syntax tree tells: one loop over the messages, whose body reads of a
message its role and content alone, writes the content, and asks no more than its type. What such a
template makes of plain messages is their texts and strings that were rendered once. Every other
template is rendered as a whole, and so are chats with tools or variables of the client.
"""

from collections.abc import Callable, Mapping
from itertools import chain

import jinja2
from jinja2 import nodes

from gateway.catalog.codec.template_limits import RenderingTakesLong, compiled, render
from gateway.request.plain_messages import ROLES, PlainMessages

_PROBE = "\x00text\x00"
_Render = Callable[..., str]
# Tests whose answer is the same for every text.
_TYPES = frozenset(("string", "defined", "undefined", "none", "mapping", "sequence", "iterable"))
_TRUTHS = (nodes.And, nodes.Or, nodes.Not, nodes.If, nodes.CondExpr)
_JOINS = (nodes.Output, nodes.TemplateData, nodes.Const, nodes.Add, nodes.Concat, nodes.Scope)


class TurnFormats:
    """Of one template. `turn`, `begin` and `end` render the loop, and what is before and after it."""

    def __init__(self, turn: _Render, begin: _Render, end: _Render) -> None:
        written = {
            role: turn(messages=[{"role": role, "content": _PROBE}]).split(_PROBE) for role in ROLES
        }
        self._before = {role: each[0] for role, each in written.items() if len(each) == 2}
        self._after = {role: written[role][1] for role in self._before}
        self._ends = {
            begins: (begin(add_generation_prompt=begins), end(add_generation_prompt=begins))
            for begins in (False, True)
        }

    def write(self, messages: PlainMessages, *, begins_answer: bool) -> str | None:
        """What the template makes of the messages; None where a text is empty or a role unknown."""
        roles, texts = messages.roles, messages.texts
        if not all(texts) or not self._before.keys() >= set(roles):
            return None
        before, after = map(self._before.__getitem__, roles), map(self._after.__getitem__, roles)
        begin, end = self._ends[begins_answer]
        return "".join((begin, *chain.from_iterable(zip(before, texts, after, strict=True)), end))


def turn_formats(
    environment: jinja2.Environment, source: str, tokens: Mapping[str, str]
) -> TurnFormats | None:
    """None for a template that does not write each turn by itself."""
    body = environment.parse(source).body
    loops = [node for node in body if isinstance(node, nodes.For)]
    if len(loops) != 1 or not _is_of_turns(loops[0], frozenset(tokens)):
        return None
    place = body.index(loops[0])
    begin, end = body[:place], body[place + 1 :]
    if any(map(_varies, (*begin, *end))):
        return None

    def _renderer(part: list[nodes.Node]) -> _Render:
        template = compiled(environment, nodes.Template(part, lineno=1))
        return lambda **variables: render(
            template, {**tokens, "tools": None, **variables}, is_trial=True
        )

    try:
        return TurnFormats(_renderer([loops[0]]), _renderer(begin), _renderer(end))
    except (jinja2.TemplateError, TypeError, ValueError, RuntimeError, RenderingTakesLong):
        return None  # rendered as a whole it says what is wrong


def _varies(node: nodes.Node) -> bool:
    """Whether what surrounds the loop may depend on the messages or the clock, or set names."""
    kinds = (nodes.Call, nodes.Assign, nodes.AssignBlock, nodes.Macro, nodes.Filter, nodes.Name)
    return any(
        not isinstance(each, nodes.Name) or each.name == "messages"
        for each in (node, *node.find_all(kinds))
        if isinstance(each, kinds)
    )


def _is_of_turns(loop: nodes.For, tokens: frozenset[str]) -> bool:
    message, over = loop.target, loop.iter
    if not isinstance(message, nodes.Name) or not isinstance(over, nodes.Name):
        return False
    if over.name != "messages" or loop.else_ or loop.test or loop.recursive:
        return False
    names = tokens - {message.name}
    return all(_writes(each, message.name, names) for each in loop.body)


def _writes(node: nodes.Node, message: str, names: frozenset[str], *, text: bool = True) -> bool:
    """Whether the node does with a text nothing but to write it and to ask for its type. Unless
    `text`, it may not stand here."""
    if (field := _field_of(node, message)) is not None:
        return field == "role" or (field == "content" and text)
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.If) and _asks_for_text(node.test, message):
        return all(_writes(each, message, names) for each in node.body)
    if isinstance(node, nodes.Test):
        return node.name in _TYPES and _writes(node.node, message, names)
    if isinstance(node, nodes.Compare | nodes.Operand):
        text = False
    elif not isinstance(node, (*_JOINS, *_TRUTHS)):
        return False
    return all(_writes(each, message, names, text=text) for each in node.iter_child_nodes())


def _asks_for_text(test: nodes.Node, message: str) -> bool:
    """Whether the test holds for every text, so that what follows otherwise is never reached."""
    if not isinstance(test, nodes.Test) or test.name != "string":
        return False
    return _field_of(test.node, message) == "content"


def _field_of(node: nodes.Node, message: str) -> str | None:
    """The field of the message that the expression reads; None for another expression."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        name = node.arg.value
    elif isinstance(node, nodes.Getattr):
        name = node.attr
    else:
        return None
    read = isinstance(node.node, nodes.Name) and node.node.name == message
    return str(name) if read else None
