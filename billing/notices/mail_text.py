"""Texts of mails: what a person reads, in sentences and without ids."""

from collections.abc import Mapping
from typing import Any

INVITED, RESET = "member.invited", "member.reset"
LINK = "link"  # of a payload: what only the addressee may see


def text_of(subject: str, payload: Mapping[str, Any]) -> str:
    """The body of the mail."""
    event = str(payload.get("event", ""))
    kinds = {"budget": _budget, "invoice": _invoice, "member": _member}
    write = kinds.get(event.partition(".")[0], _other)
    return "\n".join([f"{subject}.", "", *write(payload), ""])


def _budget(payload: Mapping[str, Any]) -> list[str]:
    currency = payload["currency"]
    effect = (
        "Requests over the cap are refused until the window ends."
        if payload["hard"]
        else "The budget is soft: no request is refused."
    )
    window = "in total" if payload["window"] == "total" else f"in {payload['window']}"
    return [
        f"Spent: {payload['spent']} {currency} of {payload['cap']} {currency} {window}.",
        f"The budget applies to {payload.get('applies_to') or payload['scope']}.",
        effect,
    ]


def _invoice(payload: Mapping[str, Any]) -> list[str]:
    lines = [f"Open: {payload['open']} {payload['currency']}."] if payload.get("open") else []
    for name, words in (
        ("due", "It is due on {}."),
        ("service_ends", "Service ends on {} unless it is paid."),
        ("pay_at", "Pay here: {}"),
    ):
        if payload.get(name):
            lines.append(words.format(payload[name]))
    return lines


def _member(payload: Mapping[str, Any]) -> list[str]:
    act = "Choose a password" if payload["event"] == INVITED else "Set a new password"
    return [
        f"{act} here: {payload.get(LINK, '')}",
        f"The link works once, until {payload['expires_at']}.",
        "If you did not expect this mail, ignore it.",
    ]


def _other(payload: Mapping[str, Any]) -> list[str]:
    shown = {name: value for name, value in payload.items() if value != "" and name != "event"}
    return [
        f"{name.replace('_', ' ').capitalize()}: {value}"
        for name, value in shown.items()
        if not name.endswith("_id") and name != "id"
    ]
