"""The `reasoning` parameter of /v1/responses."""

from typing import Any

from core.errors import BadRequest, UnsupportedParameter
from gateway.formats.chat import request


def effort_of(given: Any) -> str | None:
    """`reasoning.effort`. All reasoning is returned, so that the summary is at the model's choice."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRequest("reasoning must be an object.", param="reasoning", code="invalid_type")
    for name, value in given.items():
        if name == "effort" and isinstance(value, str | None):
            continue
        if name == "summary" and value in (None, "auto"):
            continue
        raise UnsupportedParameter(
            f"reasoning.{name[:80]} with this value is not supported.",
            next_step="Send effort, and no summary or auto.",
            param=f"reasoning.{name[:80]}",
        )
    return request.effort_of(given.get("effort"), "reasoning.effort")
