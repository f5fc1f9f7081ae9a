"""Appends a complete response to its conversation."""

import logging
from typing import Any

from sqlalchemy.orm import Session

from core.errors import NotFound
from core.responses.conversations import Conversations
from core.tenants.scope import TenantScope
from gateway.serving.stored_responses.expansion import ResponseStore

log = logging.getLogger("tollhouse.responses")


def append_to_conversation(
    session: Session,
    store: ResponseStore,
    scope: TenantScope,
    conversation_id: str,
    items: list[dict[str, Any]],
) -> None:
    found = Conversations(session, store.sealer, scope, store.clock.now())
    try:
        found.add(conversation_id, items)
    except NotFound:
        log.info("%s was deleted while a response to it ran", conversation_id)
