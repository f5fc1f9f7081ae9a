"""vLLM's `structured_outputs` and its older `guided_*` fields, as one engine parameter."""

from operator import attrgetter
from typing import Any

from core.errors import BadRequest, UnsupportedParameter
from gateway.formats.sampling import SamplingBody

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_guided = attrgetter(*_GUIDED)
_NOT_GUIDED = (None,) * len(_GUIDED)
_NAME = "structured_outputs"


def structured_of(body: SamplingBody, form: Any = None) -> tuple[dict[str, Any], dict[str, str]]:
    """The engine parameter `structured_outputs`, if one is asked for, and the field that asks for it,
    by the parameter's name. `form`: the response_format."""
    asked = _asked(body)
    if not asked:
        return {}, {}
    if len(asked) > 1 or form not in (None, {"type": "text"}):
        named = [*asked, *(["response_format"] if form is not None else [])]
        raise BadRequest(
            f"The output can have one form only; {' and '.join(named)} are set.",
            next_step="Remove all but one.",
            param=next(iter(asked)),
            code="invalid_value",
        )
    ((name, (kind, value)),) = asked.items()
    _check(name, kind, value)
    return {_NAME: {kind: value}}, {_NAME: name}


def _asked(body: SamplingBody) -> dict[str, tuple[str, Any]]:
    """The kind and the value by the name of the field."""
    asked: dict[str, tuple[str, Any]] = {}
    if _guided(body) != _NOT_GUIDED:
        for name in _GUIDED:
            if (value := getattr(body, name)) is not None:
                asked[name] = name.removeprefix("guided_"), value
    given = body.structured_outputs
    if given is None:
        return asked
    if not isinstance(given, dict):
        raise _invalid("structured_outputs", f"an object with one of {', '.join(_KINDS)}")
    for kind, value in given.items():
        if value is None or value is False:
            continue
        if kind not in _KINDS:
            raise UnsupportedParameter(
                f"structured_outputs.{kind} is not supported.",
                next_step=f"Use one of {', '.join(_KINDS)}.",
                param=f"structured_outputs.{kind}",
            )
        asked[f"structured_outputs.{kind}"] = kind, value
    return asked


def _check(name: str, kind: str, value: Any) -> None:
    if kind == "json" and not isinstance(value, dict | str):
        raise _invalid(name, "a JSON schema, as an object or a string")
    if kind in ("regex", "grammar") and not (isinstance(value, str) and value):
        raise _invalid(name, "a string that is not empty")
    if kind == "choice" and not (isinstance(value, list) and value):
        raise _invalid(name, "a list of strings")
    if kind == "json_object" and value is not True:
        raise _invalid(name, "true")


def _invalid(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )
