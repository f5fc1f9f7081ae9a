"""Bodies of messages as their receivers read them: ours, Slack's, Teams' and PagerDuty's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from billing.notices import mail_text
from core.errors import BadRequest

JSON, SLACK, TEAMS, PAGERDUTY = "records", "slack", "teams", "pagerduty"
FORMATS = {
    JSON: "JSON, signed",
    SLACK: "Slack (incoming webhook)",
    TEAMS: "Microsoft Teams (workflow)",
    PAGERDUTY: "PagerDuty (Events API v2)",
}
PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
_SEVERITIES = {
    "invoice.suspended": "critical",
    "payment.failed": "error",
    "export.parked": "error",
    "budget.threshold": "warning",
    "invoice.reminder": "warning",
}
_CARD = "application/vnd.microsoft.card.adaptive"
_LONGEST_HEADER, _LONGEST_SECTION, _LONGEST_SUMMARY, _LONGEST_DEDUPE = 150, 3000, 1024, 255


@dataclass(frozen=True, slots=True)
class Shape:
    format: str = JSON
    routing_key: str | None = None  # PagerDuty's

    def check(self) -> None:
        """BadRequest for a format that there is not, or PagerDuty without its key."""
        if self.format not in FORMATS:
            raise BadRequest(
                f"There is no format {self.format[:40]!r}.",
                next_step=f"Use one of {', '.join(FORMATS)}.",
                param="format",
            )
        key = self.routing_key or ""
        if (self.format == PAGERDUTY) != bool(key) or len(key) > 400 or not key.isascii():
            raise BadRequest(
                "A routing key is for PagerDuty, which needs one.",
                next_step="Copy the integration key of the service's Events API v2 integration.",
                param="routing_key",
            )

    def body(self, subject: str, payload: Mapping[str, Any], dedupe: str) -> dict[str, Any]:
        text = mail_text.text_of(subject, payload).partition("\n\n")[2].strip()
        if self.format == SLACK:
            return _slack(subject, text)
        if self.format == TEAMS:
            return _teams(subject, text)
        if self.format == PAGERDUTY:
            return {
                "routing_key": self.routing_key,
                "event_action": "trigger",
                "dedup_key": dedupe[-_LONGEST_DEDUPE:],
                "payload": {
                    "summary": subject[:_LONGEST_SUMMARY],
                    "source": "tollhouse",
                    "severity": _SEVERITIES.get(str(payload.get("event")), "info"),
                    "custom_details": dict(payload),
                },
            }
        return dict(payload)


def _slack(subject: str, text: str) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [
        {
            "type": "header",
            "text": {"type": "plain_text", "text": subject[:_LONGEST_HEADER]},
        }
    ]
    if text:
        section = {"type": "mrkdwn", "text": _escaped(text)[:_LONGEST_SECTION]}
        blocks.append({"type": "section", "text": section})
    return {"text": _escaped(subject), "blocks": blocks}


def _escaped(text: str) -> str:
    """As Slack asks, so that no name becomes a mention or a link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams(subject: str, text: str) -> dict[str, Any]:
    lines = [{"type": "TextBlock", "text": line, "wrap": True} for line in text.splitlines()]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [
            {"type": "TextBlock", "text": subject, "weight": "Bolder", "wrap": True},
            *lines,
        ],
    }
    return {"type": "message", "attachments": [{"contentType": _CARD, "content": card}]}
