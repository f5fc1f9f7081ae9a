"""Days and moments as commands take them."""

from datetime import UTC, datetime

from core.errors import BadRequest


def moment_of(text: str) -> datetime:
    """`2026-01-31`, or a moment; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{text!r} is no date.", next_step="Write it as 2026-01-31.") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
