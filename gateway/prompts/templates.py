"""Chat templates in Jinja2's immutable sandbox, with the extras that published templates use."""

import json
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.clock import SystemClock
from core.errors import BadRequest, SettingError


class ChatTemplate:
    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise SettingError(
                f"The model's chat template does not parse: {error}.",
                next_step="Correct chat_template in tokenizer_config.json.",
            ) from None
        # Jinja copies the globals on each render, and a plain dict copies faster than its ChainMap.
        self._template.globals = dict(self._template.globals)
        self._tokens = tokens
        self.supports_tools = "tools" in source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
                **extra,
            )
        except BadRequest:
            raise
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise BadRequest(
                f"The model's chat template cannot render these messages: {error}.",
                next_step="Use roles and content parts that the model supports.",
                param="messages",
            ) from None


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise BadRequest(
        f"The model's chat template rejects these messages: {message}.", param="messages"
    )


def _strftime_now(form: str) -> str:
    return SystemClock().now().strftime(form)
