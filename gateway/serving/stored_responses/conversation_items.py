"""Appends a complete response to its conversation."""

import logging

from sqlalchemy.orm import Session

from core.errors import NotFound
from core.responses.conversations import Conversations, Item
from core.responses.end_users import end_users_of
from core.tenants.scope import TenantScope
from gateway.serving.stored_responses.expansion import ResponseStore

log = logging.getLogger("tollhouse.responses")


def append_to_conversation(
    session: Session,
    store: ResponseStore,
    scope: TenantScope,
    own: list[Item],
    response: Item,
) -> None:
    """`own`: the items of the request."""
    conversation_id = response["conversation"]["id"]
    found = Conversations(session, store.sealer, scope, store.clock.now())
    try:
        found.add(conversation_id, [*own, *response["output"]], end_users_of("", response))
    except NotFound:
        log.info("%s was deleted while a response to it ran", conversation_id)
