"""Mails that carry a one-time link for a member."""

from datetime import datetime

from sqlalchemy.orm import Session

from billing.notices import outbox
from billing.notices.mail_text import INVITED, LINK, RESET
from core.tenants.invitations import Invitation
from core.tenants.models import Tenant


def send_link(
    session: Session,
    tenant_id: str,
    invitation: Invitation,
    base_url: str,
    now: datetime,
    event: str = INVITED,
) -> None:
    """Queue the mail. Its link is removed from the queue when the mail is sent, or cannot be."""
    organisation = session.get_one(Tenant, tenant_id).display_name
    subjects = {
        INVITED: f"You are invited to {organisation}",
        RESET: f"Set a new password for {organisation}",
    }
    payload = {
        "event": event,
        "organisation": organisation,
        LINK: invitation.url(base_url),
        "expires_at": f"{invitation.expires_at:%Y-%m-%d %H:%M} UTC",
    }
    outbox.put(
        session,
        tenant_id=tenant_id,
        subject=subjects[event],
        payload=payload,
        dedupe=f"{event}:{invitation.member_id}:{invitation.expires_at.isoformat()}",
        emails=[invitation.email],
        now=now,
    )
