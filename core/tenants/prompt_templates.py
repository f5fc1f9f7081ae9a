"""Prompt templates of a tenant: a name, and versions that never change.

A template is a list of messages with placeholders such as `{{customer}}`. Filling puts the texts of
the variables in their places, once: nothing is evaluated, and a text that holds a placeholder stays
as it is. Texts of templates are not encrypted: they are the tenant's configuration.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id
from core.tenants import audit
from core.tenants.models import PromptTemplate, PromptVersion
from core.tenants.scope import TenantScope

PREFIX = "pmpt"
ROLES = ("system", "developer", "user", "assistant")
MOST_MESSAGES = 64
MOST_VARIABLES = 64
LONGEST_TEXT = 256 * 1024  # characters of one version
LONGEST_NAME = 120
MOST_TEMPLATES = 1_000
MOST_VERSIONS = 1_000
_PLACE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")
Messages = list[dict[str, str]]


def variables_of(messages: Sequence[Mapping[str, str]]) -> list[str]:
    """The names of the placeholders, in the order of their first use."""
    return list(dict.fromkeys(n for each in messages for n in _PLACE.findall(each["content"])))


def fill(messages: Sequence[Mapping[str, str]], texts: Mapping[str, str]) -> Messages:
    """The messages with their placeholders replaced. `texts` has all of them."""

    def _text(match: re.Match[str]) -> str:
        return texts[match.group(1)]

    return [
        {"role": each["role"], "content": _PLACE.sub(_text, each["content"])} for each in messages
    ]


def check_messages(messages: Any) -> Messages:
    """BadRequest, with the place, for what is not a list of messages."""
    if not isinstance(messages, list) or not 1 <= len(messages) <= MOST_MESSAGES:
        raise _wrong("messages", f"a list of 1 to {MOST_MESSAGES} messages")
    for index, each in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(each, dict) or set(each) != {"role", "content"}:
            raise _wrong(where, "an object of role and content")
        if each["role"] not in ROLES:
            raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}")
        if not isinstance(each["content"], str) or not each["content"]:
            raise _wrong(f"{where}.content", "a text")
    if sum(len(each["content"]) for each in messages) > LONGEST_TEXT:
        raise _wrong("messages", f"at most {LONGEST_TEXT} characters together")
    if len(variables_of(messages)) > MOST_VARIABLES:
        raise _wrong("messages", f"a template of at most {MOST_VARIABLES} variables")
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def create(
    session: Session, scope: TenantScope, clock: Clock, *, name: str, messages: Any
) -> PromptTemplate:
    checked = check_messages(messages)
    _check_name(name)
    mine = select(PromptTemplate).where(
        PromptTemplate.tenant_id == scope.tenant_id, PromptTemplate.removed_at.is_(None)
    )
    if session.scalar(mine.where(PromptTemplate.name == name)) is not None:
        raise Conflict(
            f"A prompt named {name!r} already exists.",
            next_step="Add a version to it, or choose another name.",
            param="name",
        )
    if (session.scalar(select(func.count()).select_from(mine.subquery())) or 0) >= MOST_TEMPLATES:
        raise BadRequest(
            f"An organisation has at most {MOST_TEMPLATES} prompts.",
            next_step="Remove one that is not used.",
            code="too_many_prompts",
        )
    row = PromptTemplate(
        id=new_id(PREFIX),
        tenant_id=scope.tenant_id,
        name=name,
        current_version=1,
        created_at=clock.now(),
    )
    session.add(row)
    session.flush()
    _add_version(session, scope, clock, row, 1, checked)
    audit.record(session, scope, clock, "prompt.create", row.id, before=None, after=describe(row))
    return row


def add_version(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    prompt_id: str,
    messages: Any,
    *,
    current: bool = True,
) -> PromptVersion:
    """`current`: requests without a version use it from now on."""
    checked = check_messages(messages)
    row = get(session, scope, prompt_id, to_change=True)
    before = describe(row)
    number = 1 + max(each.version for each in versions(session, row))
    if number > MOST_VERSIONS:
        raise BadRequest(
            f"A prompt has at most {MOST_VERSIONS} versions.",
            next_step="Create a new prompt.",
            code="too_many_versions",
        )
    made = _add_version(session, scope, clock, row, number, checked)
    if current:
        row.current_version = number
    session.flush()
    after = describe(row) | {"new_version": number}
    audit.record(session, scope, clock, "prompt.version", row.id, before=before, after=after)
    return made


def change(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    prompt_id: str,
    *,
    current_version: int,
) -> PromptTemplate:
    row = get(session, scope, prompt_id, to_change=True)
    before = describe(row)
    row.current_version = version(session, row, current_version).version
    session.flush()
    audit.record(session, scope, clock, "prompt.change", row.id, before=before, after=describe(row))
    return row


def remove(session: Session, scope: TenantScope, clock: Clock, prompt_id: str) -> PromptTemplate:
    """Requests that name it are refused from now on; the texts of its versions are deleted."""
    row = get(session, scope, prompt_id, to_change=True)
    before = describe(row)
    row.removed_at = clock.now()
    for each in versions(session, row):
        session.delete(each)
    session.flush()
    audit.record(session, scope, clock, "prompt.remove", row.id, before=before, after=None)
    return row


def all_of(session: Session, scope: TenantScope) -> list[PromptTemplate]:
    query = select(PromptTemplate).where(
        PromptTemplate.tenant_id == scope.tenant_id, PromptTemplate.removed_at.is_(None)
    )
    return list(session.scalars(query.order_by(PromptTemplate.id)))


def get(
    session: Session, scope: TenantScope, prompt_id: str, *, to_change: bool = False
) -> PromptTemplate:
    """By its id."""
    row = session.get(PromptTemplate, prompt_id, with_for_update=to_change)
    if row is None or row.tenant_id != scope.tenant_id or row.removed_at is not None:
        raise not_found(prompt_id)
    return row


def versions(session: Session, row: PromptTemplate) -> list[PromptVersion]:
    query = select(PromptVersion).where(PromptVersion.prompt_id == row.id)
    return list(session.scalars(query.order_by(PromptVersion.version)))


def version(session: Session, row: PromptTemplate, number: int) -> PromptVersion:
    found = session.get(PromptVersion, (row.id, number)) if 0 < number < 1 << 31 else None
    if found is None:
        raise NotFound(
            f"The prompt {row.id} has no version {number}.",
            next_step=f"GET /admin/v1/prompts/{row.id}/versions lists them.",
            param="prompt.version",
            code="prompt_not_found",
        )
    return found


def not_found(prompt_id: str) -> NotFound:
    return NotFound(
        f"There is no prompt {prompt_id[:80]!r}.",
        next_step="GET /admin/v1/prompts lists them.",
        param="prompt.id",
        code="prompt_not_found",
    )


def describe(row: PromptTemplate) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "prompt",
        "name": row.name,
        "current_version": row.current_version,
        "created_at": row.created_at.isoformat(),
    }


def describe_version(row: PromptVersion) -> dict[str, Any]:
    return {
        "id": row.prompt_id,
        "object": "prompt.version",
        "version": row.version,
        "messages": row.messages,
        "variables": variables_of(row.messages),
        "created_at": row.created_at.isoformat(),
        "created_by": row.created_by,
    }


def _add_version(
    session: Session,
    scope: TenantScope,
    clock: Clock,
    row: PromptTemplate,
    number: int,
    messages: Messages,
) -> PromptVersion:
    made = PromptVersion(
        prompt_id=row.id,
        version=number,
        messages=messages,
        created_at=clock.now(),
        created_by=scope.actor[:40],
    )
    session.add(made)
    session.flush()
    return made


def _check_name(name: str) -> None:
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise _wrong("name", f"1 to {LONGEST_NAME} printable characters")


def _wrong(param: str, form: str) -> BadRequest:
    return BadRequest(
        f"{param} must be {form}.",
        next_step=f"Correct {param}.",
        param=param,
        code="invalid_value",
    )
