"""What the pipeline asks of the safety desk: a verdict on the prompt, guards for the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.tenants.keys import Principal
from gateway.ask import Ask
from gateway.exchange import Headers
from gateway.streaming import OutputGuard


@dataclass(frozen=True, slots=True)
class Screened:
    """`ask` is another one where the policy redacts. `action` is the strongest that was taken."""

    ask: Ask
    action: str | None = None
    headers: Headers | None = None


class SafetyDesk(Protocol):
    async def screen(self, request_id: str, principal: Principal, ask: Ask) -> Screened:
        """Raises ContentBlocked, or Unavailable where the policy fails closed."""

    def guard(self, request_id: str, principal: Principal, choices: int) -> Sequence[OutputGuard]:
        """One for each choice, or none at all."""


class NoSafetyDesk:
    """`TOLLHOUSE_MODERATION=off`."""

    async def screen(self, request_id: str, principal: Principal, ask: Ask) -> Screened:
        return Screened(ask)

    def guard(self, request_id: str, principal: Principal, choices: int) -> Sequence[OutputGuard]:
        return ()
