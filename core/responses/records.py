"""Stored responses: kept for 30 days, visible to their own project only, encrypted at rest."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from core.errors import BadRequest, NotFound
from core.responses.end_users import end_users_of, keys_of
from core.responses.models import (
    CompletionRecord,
    ConversationRecord,
    ResponseEventRecord,
    ResponseItemRecord,
    ResponseRecord,
)
from core.sealing import Sealer
from core.tenants.keys import Principal
from core.tenants.scope import TenantScope

KEPT = timedelta(days=30)
_LONGEST_CHAIN = 500  # responses that build on one another


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A response in OpenAI's format, and the items of its own request."""

    response: dict[str, Any]
    input: list[dict[str, Any]]


def is_visible(
    row: ResponseRecord | ConversationRecord | CompletionRecord, scope: TenantScope, now: datetime
) -> bool:
    same_project = scope.project_id is None or row.project_id == scope.project_id
    return row.tenant_id == scope.tenant_id and same_project and row.expires_at > now


def save(
    session: Session, sealer: Sealer, principal: Principal, given: Exchanged, now: datetime
) -> None:
    response_id, tenant_id = given.response["id"], principal.tenant_id
    content = orjson.dumps({"response": given.response, "input": given.input})
    sealed = sealer.seal(tenant_id, response_id, content)
    session.add(
        ResponseRecord(
            id=response_id,
            tenant_id=tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            previous_id=given.response.get("previous_response_id"),
            created_at=now,
            expires_at=now + KEPT,
            sealed=sealed,
            stored_bytes=len(sealed),
            **keys_of(sealer, tenant_id, end_users_of("", given.response)),
        )
    )
    session.flush()
    _name_items(session, response_id, (*given.input, *given.response["output"]))


def replace(
    session: Session, sealer: Sealer, row: ResponseRecord, response: dict[str, Any]
) -> None:
    """Stores the response in place of the row's, with the same input."""
    content = orjson.dumps({"response": response, "input": opened(sealer, row).input})
    sealed = sealer.seal(row.tenant_id, row.id, content)
    row.stored_bytes += len(sealed) - len(row.sealed)
    row.sealed = sealed
    _name_items(session, row.id, response["output"])


def get(
    session: Session, sealer: Sealer, scope: TenantScope, response_id: str, now: datetime
) -> Exchanged:
    """NotFound if it does not exist, has expired or belongs to another project."""
    row = row_of(session, scope, response_id, now)
    found = opened(sealer, row)
    if row.status is not None:
        found.response["status"] = row.status
    return found


def opened(sealer: Sealer, row: ResponseRecord) -> Exchanged:
    content = orjson.loads(sealer.open(row.tenant_id, row.id, row.sealed))
    return Exchanged(content["response"], content["input"])


def history(
    session: Session, sealer: Sealer, scope: TenantScope, response_id: str, now: datetime
) -> list[dict[str, Any]]:
    """The items of the response, of its request, and of all before it, in order."""
    turns: list[Exchanged] = []
    following: str | None = response_id
    while following is not None:
        if len(turns) == _LONGEST_CHAIN:
            raise BadRequest(
                f"The conversation has more than {_LONGEST_CHAIN} responses.",
                next_step="Send its items in input instead of previous_response_id.",
                param="previous_response_id",
            )
        turns.append(_previous(session, sealer, scope, following, now))
        if turns[-1].response["status"] in ("queued", "in_progress"):
            raise BadRequest(
                f"{following[:80]} is still running in the background.",
                next_step="Continue it once its status is completed.",
                param="previous_response_id",
                code="invalid_value",
            )
        following = turns[-1].response.get("previous_response_id")
    return [item for turn in reversed(turns) for item in (*turn.input, *turn.response["output"])]


def _previous(
    session: Session, sealer: Sealer, scope: TenantScope, response_id: str, now: datetime
) -> Exchanged:
    try:
        return get(session, sealer, scope, response_id, now)
    except NotFound as error:
        raise BadRequest(
            f"Previous response with id {response_id[:80]!r} not found.",
            next_step=error.next_step,
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None


def item(
    session: Session, sealer: Sealer, scope: TenantScope, item_id: str, now: datetime
) -> dict[str, Any]:
    owners = (
        select(ResponseItemRecord.response_id)
        .join(ResponseRecord, ResponseRecord.id == ResponseItemRecord.response_id)
        .where(ResponseItemRecord.item_id == item_id, ResponseRecord.tenant_id == scope.tenant_id)
        .limit(1)
    )
    owner = session.scalar(owners)
    if owner is not None:
        turn = get(session, sealer, scope, owner, now)
        for each in (*turn.input, *turn.response["output"]):
            if each.get("id") == item_id:
                return dict(each)
    raise _unknown("item", item_id)


def remove(session: Session, scope: TenantScope, response_id: str, now: datetime) -> None:
    delete_rows(session, [row_of(session, scope, response_id, now).id])


def drop_expired(session: Session, now: datetime) -> None:
    expired = select(ResponseRecord.id).where(ResponseRecord.expires_at <= now).limit(10_000)
    delete_rows(session, list(session.scalars(expired)))


def delete_rows(session: Session, ids: list[str]) -> None:
    session.execute(delete(ResponseItemRecord).where(ResponseItemRecord.response_id.in_(ids)))
    session.execute(delete(ResponseEventRecord).where(ResponseEventRecord.response_id.in_(ids)))
    session.execute(delete(ResponseRecord).where(ResponseRecord.id.in_(ids)))


def _name_items(session: Session, response_id: str, items: Iterable[dict[str, Any]]) -> None:
    mine = ResponseItemRecord.response_id == response_id
    known = session.scalars(select(ResponseItemRecord.item_id).where(mine))
    named = {item["id"] for item in items if item.get("id")} - set(known)
    session.add_all(ResponseItemRecord(response_id=response_id, item_id=each) for each in named)


def row_of(
    session: Session,
    scope: TenantScope,
    response_id: str,
    now: datetime,
    *,
    to_change: bool = False,
) -> ResponseRecord:
    row = session.get(ResponseRecord, response_id, with_for_update=to_change)
    if row is None or not is_visible(row, scope, now):
        raise _unknown("response", response_id)
    return row


def _unknown(what: str, name: str) -> NotFound:
    return NotFound(
        f"There is no stored {what} {name[:80]!r}.",
        next_step="Responses are stored for 30 days, unless store is false or the organisation's "
        "setting store_responses is; send the items in input instead.",
        code=f"{what}_not_found",
    )
