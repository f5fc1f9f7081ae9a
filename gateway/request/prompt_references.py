"""`prompt` of a request: names a template of the tenant, its version and the texts of its variables."""

from typing import Any

from msgspec import Struct

from core.errors import BadRequest
from core.tenants.prompt_templates import MOST_VARIABLES

_FIELDS = {"id", "version", "variables"}


class PromptReference(Struct, frozen=True):
    id: str
    version: int | None  # None: the current one
    variables: dict[str, str]
    before: int  # the template's messages come after so many of the request's


def reference_of(given: Any, before: int = 0) -> PromptReference | None:
    """BadRequest, with the field, for one that is not as OpenAI has it. Variables are texts."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _wrong("prompt", "an object of id, version and variables")
    for name in given:
        if name not in _FIELDS:
            raise _wrong(f"prompt.{name[:80]}", "omitted")
    prompt_id, version = given.get("id"), given.get("version")
    if not isinstance(prompt_id, str) or not 0 < len(prompt_id) <= 80:
        raise _wrong("prompt.id", "the id of a prompt")
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) < 9:
        version = int(version)  # as OpenAI writes it
    if version is not None and (type(version) is not int or version < 1):
        raise _wrong("prompt.version", "a whole number from 1")
    variables = given.get("variables")
    if variables is None:
        variables = {}
    if not isinstance(variables, dict) or len(variables) > MOST_VARIABLES:
        raise _wrong("prompt.variables", f"an object of at most {MOST_VARIABLES} texts")
    texts = {name: _text(name, value) for name, value in variables.items()}
    return PromptReference(prompt_id, version, texts, before)


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type", "text"} and value["type"] == "input_text":
        value = value["text"]
    if not isinstance(value, str):
        raise _wrong(f"prompt.variables.{name[:80]}", "a text, or an object of type input_text")
    return value


def _wrong(param: str, form: str) -> BadRequest:
    return BadRequest(
        f"{param} must be {form}.",
        next_step=f"Correct {param}.",
        param=param,
        code="invalid_value",
    )
