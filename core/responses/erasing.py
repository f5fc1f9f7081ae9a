"""Erases what is stored of an end user's texts: responses, completions and turns of conversations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from core.errors import NotFound
from core.responses import records
from core.responses.completions import end_users_in
from core.responses.end_users import NOBODY, end_users_of, is_of, key_of
from core.responses.models import (
    CompletionRecord,
    ConversationItemRecord,
    ConversationRecord,
    ResponseRecord,
)
from core.sealing import Sealer

_AT_ONCE = 500  # ids in one statement


@dataclass(frozen=True, slots=True)
class ErasedTexts:
    """Rows that were deleted, and those of which nobody can say whose they are."""

    responses: int
    completions: int
    conversations: int  # whole ones, in which nobody else was named
    conversation_items: int  # without those of whole conversations
    unreadable: int  # stored under another operator token


def erase_texts(session: Session, sealer: Sealer, tenant_id: str, end_user: str) -> ErasedTexts:
    """Delete the end user's stored responses, completions and turns of conversations. A response that
    builds on a deleted one keeps its own input and output, and can no longer be continued."""
    key = key_of(sealer, tenant_id, end_user)
    older = _Older(session, sealer, tenant_id, end_user)
    responses = {*_ids(session, ResponseRecord, tenant_id, key), *older.responses()}
    completions = {*_ids(session, CompletionRecord, tenant_id, key), *older.completions()}
    for some in _in_parts(sorted(responses)):
        records.delete_rows(session, some)
    for some in _in_parts(sorted(completions)):
        session.execute(delete(CompletionRecord).where(CompletionRecord.id.in_(some)))
    conversations, items = _erase_turns(session, tenant_id, key)
    lost = older.unreadable + _of_other_tokens(session, tenant_id, sealer.generation(tenant_id))
    return ErasedTexts(len(responses), len(completions), conversations, items, lost)


def _ids(session: Session, table: Any, tenant_id: str, key: str) -> list[str]:
    return list(
        session.scalars(select(table.id).where(table.tenant_id == tenant_id, is_of(table, key)))
    )


class _Older:
    """The rows of before keys were written, which are opened to see whose they are."""

    def __init__(self, session: Session, sealer: Sealer, tenant_id: str, end_user: str) -> None:
        self.unreadable = 0
        self._session = session
        self._sealer = sealer
        self._tenant_id = tenant_id
        self._end_user = end_user

    def responses(self) -> list[str]:
        return self._those(ResponseRecord, lambda text: end_users_of("", text["response"]))

    def completions(self) -> list[str]:
        return self._those(CompletionRecord, end_users_in)

    def _those(self, table: Any, named: Callable[[Any], tuple[str, ...]]) -> list[str]:
        found = []
        rows = select(table.id, table.sealed).where(
            table.tenant_id == self._tenant_id, table.end_user_key.is_(None)
        )
        for row_id, sealed in self._session.execute(rows).yield_per(_AT_ONCE):
            try:
                text = orjson.loads(self._sealer.open(self._tenant_id, row_id, sealed))
            except NotFound:
                self.unreadable += 1
                continue
            if self._end_user in named(text):
                found.append(row_id)
        return found


def _erase_turns(session: Session, tenant_id: str, key: str) -> tuple[int, int]:
    """(whole conversations, items of others)."""
    item, theirs = ConversationItemRecord, ConversationItemRecord.end_user_key
    mine = is_of(item, key)
    joined = select(item.conversation_id).join(
        ConversationRecord, ConversationRecord.id == item.conversation_id
    )
    named = set(session.scalars(joined.where(mine, ConversationRecord.tenant_id == tenant_id)))
    whole = items = 0
    for some in _in_parts(sorted(named)):
        of_others = select(item.conversation_id).where(
            item.conversation_id.in_(some),
            or_(theirs.is_(None), theirs.not_in((key, NOBODY))),
            func.coalesce(item.safety_key, NOBODY) != key,
        )
        shared = set(session.scalars(of_others))
        alone = [each for each in some if each not in shared]
        whole += len(alone)
        session.execute(delete(item).where(item.conversation_id.in_(alone)))
        session.execute(delete(ConversationRecord).where(ConversationRecord.id.in_(alone)))
        gone = delete(item).where(item.conversation_id.in_(shared), mine)
        items += len(session.execute(gone.returning(item.item_id)).all())
        _count_again(session, sorted(shared))
    return whole, items


def _count_again(session: Session, conversation_ids: list[str]) -> None:
    row, item = ConversationRecord, ConversationItemRecord
    left = (
        select(func.coalesce(func.sum(func.length(item.sealed)), 0))
        .where(item.conversation_id == row.id)
        .scalar_subquery()
    )
    session.execute(
        update(row)
        .where(row.id.in_(conversation_ids))
        .values(stored_bytes=func.length(row.sealed) + left)
        .execution_options(synchronize_session=False)
    )


def _of_other_tokens(session: Session, tenant_id: str, generation: str) -> int:
    item = ConversationItemRecord
    items = (
        select(func.count())
        .select_from(item)
        .join(ConversationRecord, ConversationRecord.id == item.conversation_id)
    )
    counts = [
        items.where(ConversationRecord.tenant_id == tenant_id, *_foreign(item, generation)),
        *(
            select(func.count()).where(table.tenant_id == tenant_id, *_foreign(table, generation))
            for table in (ResponseRecord, CompletionRecord)
        ),
    ]
    return sum(session.scalar(each) or 0 for each in counts)


def _foreign(table: Any, generation: str) -> tuple[Any, ...]:
    key = table.end_user_key
    return key != NOBODY, key.not_like(f"{generation}%")


def _in_parts(ids: list[str]) -> list[list[str]]:
    return [ids[first : first + _AT_ONCE] for first in range(0, len(ids), _AT_ONCE)]
