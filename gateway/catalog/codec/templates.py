"""Chat templates in Jinja2's immutable sandbox, with the extras that published templates use."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from core.clock import SystemClock
from core.errors import BadRequest, SettingError
from gateway.catalog.codec.call_turns import CallTurns, call_turns
from gateway.catalog.codec.template_limits import LimitedEnvironment, compiled, render
from gateway.catalog.codec.turn_formats import turn_formats
from gateway.request.plain_messages import PlainMessages

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
            return render(template, variables, is_trial=is_trial)
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
