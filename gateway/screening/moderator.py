"""The moderation interface of the pipeline: prompt screening, and guards for the output."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from core.errors import ContentBlocked
from core.tenants.keys import Principal
from gateway.request.exchange import Headers
from gateway.request.inference import InferenceRequest
from gateway.request.output_guard import OutputGuard

Continued = Callable[[int], str]  # the number of a choice -> the text that it continues


class ScreeningResult(Struct, frozen=True):
    """`request` is a changed copy when the policy redacts. `action` is the strongest action taken."""

    request: InferenceRequest
    action: str | None = None
    headers: Headers | None = None


class PromptBlocked(ContentBlocked):
    """`paid_by` says who pays for the prompt under the policy: `tenant` or `operator`."""

    def __init__(self, message: str, *, paid_by: str, next_step: str, param: str) -> None:
        super().__init__(message, next_step=next_step, param=param)
        self.paid_by = paid_by


class Moderator(Protocol):
    async def screen(
        self, request_id: str, principal: Principal, request: InferenceRequest
    ) -> ScreeningResult:
        """Raises PromptBlocked, also when a stage fails and the policy fails closed."""

    def guard(
        self, request_id: str, principal: Principal, choices: int, before: Continued | None = None
    ) -> Sequence[OutputGuard]:
        """One guard per choice, or none when output is not moderated. `before` gives the text that a
        choice continues."""

    def close(self) -> None:
        """Write the gathered decisions to the spool at shutdown."""


class NoModeration:
    """Used with `TOLLHOUSE_MODERATION=off`."""

    async def screen(
        self, request_id: str, principal: Principal, request: InferenceRequest
    ) -> ScreeningResult:
        return ScreeningResult(request)

    def guard(
        self, request_id: str, principal: Principal, choices: int, before: Continued | None = None
    ) -> Sequence[OutputGuard]:
        return ()

    def close(self) -> None:
        return
