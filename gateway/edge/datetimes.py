"""Parses dates and times from CLI options and query parameters."""

from datetime import UTC, datetime

from core.clock import usual
from core.errors import BadRequest


def parse_datetime(text: str, name: str | None = None) -> datetime:
    """Parses ISO 8601; without an offset it is UTC. `name` is the parameter that an error names."""
    try:
        moment = datetime.fromisoformat(text)
        return usual(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    except ValueError:
        subject = f"{name} is" if name else "The value is"
        raise BadRequest(
            f"{subject} {text[:40]!r}, which is not an ISO 8601 date of the years 1970 to 2199.",
            next_step="Write 2026-01-31, or 2026-01-31T12:00:00Z.",
            param=name,
        ) from None
