"""Where alerts may go: an address that could never be reached is refused when it is saved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.errors import BadRequest
from core.outbound import check_address, check_public


@dataclass(frozen=True, slots=True)
class AlertTargets:
    networks: Sequence[str] = ()  # private networks that webhooks may reach
    sends_mail: bool = False

    def check(self, webhooks: Iterable[str] = (), emails: Iterable[str] = ()) -> None:
        """Resolves the names of webhooks, so call it outside of a transaction. Raises BadRequest."""
        for url in webhooks:
            check_address(url)
            check_public(url, self.networks)
        if not self.sends_mail and any(emails):
            raise BadRequest(
                "No mail can be sent: the deployment has no mail server.",
                next_step="Use a webhook, or ask the operator to set TOLLHOUSE_SMTP_URL.",
                param="emails",
            )
