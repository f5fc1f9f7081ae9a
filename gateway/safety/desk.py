"""What the pipeline asks of the safety desk: a verdict on the prompt, guards for the answer."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from core.errors import ContentBlocked
from core.tenants.keys import Principal
from gateway.ask import Ask
from gateway.exchange import Headers
from gateway.streaming.choices import OutputGuard


class Screened(Struct, frozen=True):
    """`ask` is another one where the policy redacts. `action` is the strongest that was taken."""

    ask: Ask
    action: str | None = None
    headers: Headers | None = None


class PromptBlocked(ContentBlocked):
    """`paid_by` is the policy's word on who bears the prompt: tenant or house."""

    def __init__(self, message: str, *, paid_by: str, next_step: str, param: str) -> None:
        super().__init__(message, next_step=next_step, param=param)
        self.paid_by = paid_by


class SafetyDesk(Protocol):
    async def screen(self, request_id: str, principal: Principal, ask: Ask) -> Screened:
        """Raises PromptBlocked, also where a stage fails and the policy closes on it."""

    def guard(self, request_id: str, principal: Principal, choices: int) -> Sequence[OutputGuard]:
        """One for each choice, or none at all."""

    def close(self) -> None:
        """Nothing more comes: what was gathered is handed over."""


class NoSafetyDesk:
    """`TOLLHOUSE_MODERATION=off`."""

    async def screen(self, request_id: str, principal: Principal, ask: Ask) -> Screened:
        return Screened(ask)

    def guard(self, request_id: str, principal: Principal, choices: int) -> Sequence[OutputGuard]:
        return ()

    def close(self) -> None:
        return
