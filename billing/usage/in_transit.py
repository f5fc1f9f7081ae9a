"""The port of usage that is on its way to the database, such as in a durable stream."""

from datetime import timedelta
from typing import Protocol


class UsageInTransit(Protocol):
    def late(self, age: timedelta) -> int:
        """Messages that are not stored though the oldest is older than `age`, else 0. Raises
        DependencyDown if that cannot be known; no audit is clean then."""
