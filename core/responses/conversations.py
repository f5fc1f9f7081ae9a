"""Conversations of the Responses API: items in order, to which responses append their own.

Encrypted at rest, visible to their own project only, and kept for 30 days after their last change.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from core.errors import BadRequest, NotFound
from core.ids import new_id
from core.responses.end_users import keys_of
from core.responses.models import ConversationItemRecord, ConversationRecord
from core.responses.records import KEPT, is_visible
from core.sealing import Sealer
from core.tenants.keys import Principal
from core.tenants.scope import TenantScope

Item = dict[str, Any]
_ITEM_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MOST_ITEMS = 10_000


class Conversations:
    """The conversations that one caller sees, at one moment."""

    def __init__(self, session: Session, sealer: Sealer, scope: TenantScope, now: datetime) -> None:
        self._session = session
        self._sealer = sealer
        self._scope = scope
        self._now = now

    def create(self, principal: Principal, metadata: dict[str, str]) -> ConversationRecord:
        row = ConversationRecord(
            id=new_id("conv"),
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            created_at=self._now,
            expires_at=self._now + KEPT,
        )
        self._set_metadata(row, metadata)
        self._session.add(row)
        self._session.flush()
        return row

    def describe(self, row: ConversationRecord) -> dict[str, Any]:
        """In OpenAI's format."""
        return {
            "id": row.id,
            "object": "conversation",
            "created_at": int(row.created_at.timestamp()),
            "metadata": orjson.loads(self._sealer.open(row.tenant_id, row.id, row.sealed)),
        }

    def get(self, conversation_id: str, *, to_change: bool = False) -> ConversationRecord:
        row = self._session.get(ConversationRecord, conversation_id, with_for_update=to_change)
        if row is None or not is_visible(row, self._scope, self._now):
            raise NotFound(
                f"There is no conversation {conversation_id[:80]!r}.",
                next_step="Create one with POST /v1/conversations; they are kept for 30 days after "
                "their last change.",
                code="conversation_not_found",
            )
        return row

    def update(self, conversation_id: str, metadata: dict[str, str]) -> ConversationRecord:
        row = self.get(conversation_id, to_change=True)
        self._set_metadata(row, metadata)
        row.expires_at = self._now + KEPT
        return row

    def remove(self, conversation_id: str) -> None:
        _delete(self._session, [self.get(conversation_id, to_change=True).id])

    def items(self, conversation_id: str) -> list[Item]:
        """In their order."""
        row = self.get(conversation_id)
        found = self._session.scalars(
            select(ConversationItemRecord)
            .where(ConversationItemRecord.conversation_id == row.id)
            .order_by(ConversationItemRecord.position)
        )
        return [self._opened(row, each) for each in found]

    def item(self, conversation_id: str, item_id: str) -> Item:
        row = self.get(conversation_id)
        return self._opened(row, self._item_row(row, item_id))

    def add(
        self, conversation_id: str, items: Sequence[Item], end_users: tuple[str, ...] = ()
    ) -> list[Item]:
        """Appends the items and returns them with their ids. An item that is there already (its id
        is) is not added twice. `end_users`: whom the request of the items named."""
        row = self.get(conversation_id, to_change=True)
        keys = keys_of(self._sealer, row.tenant_id, end_users)
        mine = ConversationItemRecord.conversation_id == row.id
        count, last = self._session.execute(
            select(func.count(), func.max(ConversationItemRecord.position)).where(mine)
        ).one()
        if count + len(items) > _MOST_ITEMS:
            raise BadRequest(
                f"The conversation would have more than {_MOST_ITEMS} items.",
                next_step="Begin a new conversation with the items that matter.",
                param="items",
                code="conversation_too_long",
            )
        ids = [each["id"] for each in items if each.get("id")]
        known = set(
            self._session.scalars(
                select(ConversationItemRecord.item_id).where(
                    mine, ConversationItemRecord.item_id.in_(ids)
                )
            )
        )
        new = {item["id"]: item for item in map(with_id, items) if item["id"] not in known}
        added = list(new.values())
        for position, item in enumerate(added, (-1 if last is None else last) + 1):
            name = _sealed_name(row.id, item["id"])
            sealed = self._sealer.seal(row.tenant_id, name, orjson.dumps(item))
            row.stored_bytes += len(sealed)
            self._session.add(
                ConversationItemRecord(
                    conversation_id=row.id,
                    position=position,
                    item_id=item["id"],
                    sealed=sealed,
                    **keys,
                )
            )
        row.expires_at = self._now + KEPT
        self._session.flush()
        return added

    def remove_item(self, conversation_id: str, item_id: str) -> ConversationRecord:
        row = self.get(conversation_id, to_change=True)
        item = self._item_row(row, item_id)
        row.stored_bytes -= len(item.sealed)
        self._session.delete(item)
        row.expires_at = self._now + KEPT
        return row

    def _set_metadata(self, row: ConversationRecord, metadata: dict[str, str]) -> None:
        before = len(row.sealed) if row.sealed else 0
        row.sealed = self._sealer.seal(row.tenant_id, row.id, orjson.dumps(metadata))
        row.stored_bytes = (row.stored_bytes or 0) + len(row.sealed) - before

    def _item_row(self, row: ConversationRecord, item_id: str) -> ConversationItemRecord:
        found = self._session.scalar(
            select(ConversationItemRecord).where(
                ConversationItemRecord.conversation_id == row.id,
                ConversationItemRecord.item_id == item_id,
            )
        )
        if found is None:
            raise NotFound(
                f"The conversation has no item {item_id[:80]!r}.",
                next_step=f"GET /v1/conversations/{row.id}/items lists them.",
                code="item_not_found",
            )
        return found

    def _opened(self, row: ConversationRecord, item: ConversationItemRecord) -> Item:
        name = _sealed_name(row.id, item.item_id)
        opened: Item = orjson.loads(self._sealer.open(row.tenant_id, name, item.sealed))
        return opened


def with_id(item: Item) -> Item:
    if item.get("id"):
        return item
    return {**item, "id": new_id(_ITEM_PREFIXES.get(str(item.get("type")), "msg"))}


def drop_expired(session: Session, now: datetime) -> None:
    expired = select(ConversationRecord.id).where(ConversationRecord.expires_at <= now)
    _delete(session, list(session.scalars(expired.limit(1_000))))


def _delete(session: Session, ids: list[str]) -> None:
    for table, column in (
        (ConversationItemRecord, ConversationItemRecord.conversation_id),
        (ConversationRecord, ConversationRecord.id),
    ):
        session.execute(delete(table).where(column.in_(ids)))


def _sealed_name(conversation_id: str, item_id: str) -> str:
    return f"{conversation_id}/{item_id}"
