"""Days and moments as people write them, in commands and in queries."""

from datetime import UTC, datetime

from core.errors import BadRequest


def moment_of(text: str, name: str | None = None) -> datetime:
    """`2026-01-31`, or a moment; without a zone it is UTC. `name` is the parameter to blame."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        named = f"{name} is" if name else "It is"
        raise BadRequest(
            f"{named} {text[:40]!r}, which is no date.",
            next_step="Write 2026-01-31, or 2026-01-31T12:00:00Z.",
            param=name,
        ) from None
