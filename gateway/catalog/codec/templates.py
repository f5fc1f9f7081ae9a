"""Chat templates in Jinja2's immutable sandbox, with the extras that published templates use."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from msgspec import Struct

from core.clock import SystemClock
from core.errors import BadRequest, SettingError, TollhouseError
from gateway.catalog.codec.template_limits import (
    LimitedEnvironment,
    RenderingTakesLong,
    compiled,
    render,
)
from gateway.request.plain_messages import ROLES, PlainMessages

# How a chat template reads turns that call tools.
#
# Templates disagree: some join the content of a message to a string, which fails where it is null; some
# take null for "only calls"; some print `None`. Some write the arguments of a call as JSON, some take
# them for a text that is JSON already. What a template does is tried once, on a conversation of ours.


_NAME, _VALUE, _KEY = "probe_tool", "probe value", "probe_key"
_FAILS = (jinja2.TemplateError, TollhouseError, TypeError, KeyError, ValueError, ArithmeticError)
_TOOL = {"type": "function", "function": {"name": _NAME, "parameters": {"type": "object"}}}


class CallTurns(Struct, frozen=True):
    null_content: bool  # the content, if it is null, of a turn that only calls stays null
    objects: bool  # arguments are objects, as transformers documents

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template reads it; the given one is not changed."""
        result = message
        if message.get("content") is None:
            calls = message["role"] == "assistant" and message.get("tool_calls")
            keeps = self.null_content and calls
            result = {**message, "content": None if keeps else ""}
        if self.objects and (calls := message.get("tool_calls")):
            result = {**result, "tool_calls": [_with_object(call) for call in calls]}
        return result


def call_turns(render: Callable[..., str]) -> CallTurns:
    """`render` takes messages and tools. Of the forms that the template renders, the first in which
    it names the tool, writes its arguments as JSON, and prints no `None`."""
    forms = [
        CallTurns(null_content, objects)
        for objects in (True, False)
        for null_content in (True, False)
    ]
    rendered = {form: text for form in forms if (text := _tried(render, form)) is not None}
    plain = min((text.count("None") for text in rendered.values()), default=0)
    shown = {form: text for form, text in rendered.items() if text.count("None") == plain}
    best = max((_merit(text) for text in shown.values()), default=0)
    return next(
        (form for form, text in shown.items() if _merit(text) == best), CallTurns(False, True)
    )


def _tried(render: Callable[..., str], form: CallTurns) -> str | None:
    function = {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})}
    call = {"id": "call12345", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "probe question"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": _NAME, "content": "probe result"},
    ]
    try:
        return render([form.message(each) for each in messages], [_TOOL])
    except _FAILS:
        return None


def _merit(text: str) -> int:
    """How much of the call the template wrote as it should be."""
    called = text.rpartition("probe question")[2]
    named, valued = _NAME in called, _VALUE in called
    python, twice = f"'{_KEY}'" in called, f'\\"{_KEY}' in called
    return named + valued + (valued and not python and not twice)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


# Chat templates that write each turn by itself: its text as it is, between two strings of its role.
#
# Whether a template does, its syntax tree tells: one loop over the messages, whose body reads of a
# message its role and content alone, writes the content, and asks no more than its type. What such a
# template makes of plain messages is their texts and strings that were rendered once. Every other
# template is rendered as a whole, and so are chats with tools or variables of the client.


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


DEFAULT, TOOL_USE = "default", "tool_use"  # names that transformers gives a meaning


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks answers for training: the body is written
    as it is. Variables that it sets stay inside, as in transformers."""

    tags = {"generation"}  # noqa: RUF012, an instance variable of the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A model's templates by name: `tool_use`, where there is one, writes chats with tools."""

    def __init__(self, sources: str | Mapping[str, str], tokens: dict[str, str]) -> None:
        named = {DEFAULT: sources} if isinstance(sources, str) else sources
        if DEFAULT not in named and TOOL_USE not in named:
            raise SettingError(
                f"The model's chat templates are named {', '.join(named)}: none is {DEFAULT!r}.",
                next_step=f"Name one of them {DEFAULT!r} in tokenizer_config.json.",
            )
        environment = _environment()
        self._template = _compiled(environment, named.get(DEFAULT) or named[TOOL_USE])
        tool_use = named.get(TOOL_USE)
        self._with_tools = self._template
        if tool_use is not None and DEFAULT in named:
            self._with_tools = _compiled(environment, tool_use)
        self.tokens = tokens
        self._turns = turn_formats(environment, named.get(DEFAULT) or named[TOOL_USE], tokens)
        self.source = "\n".join(named.values())
        # Of the variables that ask for reasoning, those that the templates read.
        self._effort_names = [
            name for name in ("reasoning_effort", "enable_thinking") if name in self.source
        ]
        self.supports_tools = tool_use is not None or "tools" in named[DEFAULT]
        self.reserved = frozenset(
            {"messages", "tools", "add_generation_prompt", *tokens, *environment.globals}
        )

    @property
    def knows_effort(self) -> bool:
        return bool(self._effort_names)

    def effort_variables(self, effort: str | None) -> dict[str, Any]:
        """The template's variables for OpenAI's `reasoning_effort`."""
        if effort is None:
            return {}
        values = {"reasoning_effort": effort, "enable_thinking": True}
        return {name: values[name] for name in self._effort_names}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        is_trial: bool = False,
        **extra: Any,
    ) -> str:
        """On an event loop it raises RenderingTakesLong early: then it belongs in a thread.
        `extra` are further variables of the template, such as `enable_thinking`."""
        if type(messages) is PlainMessages and self._turns and not tools and not extra:
            text = self._turns.write(messages, begins_answer=add_generation_prompt)
            if text is not None:
                return text
        template = self._with_tools if tools else self._template
        variables = {
            **extra,
            **self.tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = render(template, variables, is_trial=is_trial)
            text.isascii() or text.encode()  # a tokenizer takes no lone surrogate
            return text
        except BadRequest:
            raise
        except Exception as error:  # whatever the operations of a template raise
            raise BadRequest(
                f"The model's chat template cannot render these messages: {error}.",
                next_step="Use roles and content parts that the model supports.",
                param="messages",
            ) from None

    @cached_property
    def call_turns(self) -> CallTurns:
        """Tried at the first message that needs it."""

        def _render(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
            offered = tools if self.supports_tools else None
            return self.render(messages, tools=offered, is_trial=True)

        return call_turns(_render)

    def check_variables(self, names: Mapping[str, Any]) -> None:
        """BadRequest for a name that is the request's or the template language's own."""
        for name in names:
            if name in self.reserved:
                raise BadRequest(
                    f"chat_template_kwargs may not set {name!r}.",
                    next_step=f"Leave out {name}; it comes from the request or the model.",
                    param=f"chat_template_kwargs.{name}",
                    code="invalid_value",
                )


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    environment.limit()
    return environment


def _compiled(environment: LimitedEnvironment, source: str) -> jinja2.Template:
    try:
        return compiled(environment, source)
    except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, MemoryError) as error:
        raise SettingError(
            f"The model's chat template does not parse: {error}.",
            next_step="Correct chat_template in tokenizer_config.json, or chat_template.jinja.",
        ) from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of transformers: Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise BadRequest(
        f"The model's chat template rejects these messages: {message}.", param="messages"
    )


def _strftime_now(form: str) -> str:
    return SystemClock().now().strftime(form)
