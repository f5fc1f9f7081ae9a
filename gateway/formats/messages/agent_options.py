"""What coding agents ask for beside the answer: thinking, effort and the editing of their context.

An answer without them is valid, so the request is served, and a note says what has no effect.
"""

from typing import TYPE_CHECKING, Any

from core.errors import BadRequest, UnsupportedParameter

if TYPE_CHECKING:
    from gateway.formats.messages.request import CountBody

_THINKING = ("enabled", "adaptive", "disabled")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# Thoughts of earlier turns are never in the prompt, so clearing them changes nothing.
_CLEARS_THINKING = "clear_thinking_"


def notes_of(body: "CountBody") -> list[str]:
    notes = []
    _refuse_thread(body.thread)
    _check_diagnostics(body.diagnostics)
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in _THINKING:
            raise _invalid("thinking.type", f"one of {', '.join(_THINKING)}")
        if kind == "enabled":
            notes.append("thinking is returned in blocks of its own if the model marks it.")
    config = body.output_config or {}
    for name in config.keys() - {"format", "effort"}:
        raise UnsupportedParameter(
            f"output_config.{name} is not supported.",
            next_step=f"Remove output_config.{name}.",
            param=f"output_config.{name}",
        )
    if (effort := config.get("effort")) is not None:
        if effort not in _EFFORTS:
            raise _invalid("output_config.effort", f"one of {', '.join(_EFFORTS)}")
        notes.append("output_config.effort has no effect on this model.")
    _check_edits(body.context_management or {})
    return notes


def _check_edits(management: dict[str, Any]) -> None:
    for index, edit in enumerate(management.get("edits") or ()):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith(_CLEARS_THINKING):
            where = f"context_management.edits[{index}]"
            raise UnsupportedParameter(
                f"{where} is not supported.", next_step="Remove it.", param=where
            )


def _refuse_thread(thread: Any) -> None:
    """Anthropic's SDKs begin with a thread and go on without one where the refusal has these
    details."""
    if thread is None:
        return
    error = UnsupportedParameter(
        "thread is not supported: conversations are not kept here.",
        next_step="Send the whole conversation without thread.",
        param="thread",
    )
    error.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    raise error


def _check_diagnostics(given: Any) -> None:
    """Without an earlier message there is nothing to compare with, so it asks for nothing."""
    if given is None or given == {} or given == {"previous_message_id": None}:
        return
    raise UnsupportedParameter(
        "diagnostics is not supported: messages are not kept here.",
        next_step="Remove diagnostics.",
        param="diagnostics",
    )


def _invalid(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )
