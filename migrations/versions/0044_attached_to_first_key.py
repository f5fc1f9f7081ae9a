"""Keys know the first key of their chain of rotations, to which budgets, limits and policies are
attached, and the member who answers for them; members know who set their password or saw their
invitation; budgets have a secret that signs their messages."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0044_attached_to_first_key"
down_revision = "0046_scarce_resources"
branch_labels = None
depends_on = None

_ID = sa.String(40)
_COLUMNS = (
    ("api_keys", "origin_id", _ID),
    ("api_keys", "member_id", _ID),
    ("members", "password_by", sa.String(20)),
    ("members", "invitation_by", sa.String(20)),
    ("budgets", "webhook_secret", sa.String(80)),
)
_ATTACHED = (
    ("budgets", "scope", "scope_id"),
    ("moderation_policies", "level", "target"),
    ("limits", "scope", "target"),
)


def upgrade() -> None:
    for table, name, kind in _COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))
    connection = op.get_bind()
    connection.execute(
        sa.text(
            "update api_keys set member_id = created_by where created_by like 'mem\\_%' escape '\\'"
        )
    )
    pairs = connection.execute(
        sa.text("select id, rotated_to from api_keys where rotated_to is not null")
    )
    before = {after: key for key, after in pairs}
    for key in before:
        first = key
        while first in before:
            first = before[first]
        _attach(connection, key, first)


def _attach(connection: Any, key: str, first: str) -> None:
    """To the first key of the chain. Of two limits of one chain the lower one stays."""
    values = {"key": key, "first": first}
    connection.execute(
        sa.text(
            "update api_keys set origin_id = :first, member_id = "
            "(select earlier.member_id from api_keys as earlier where earlier.id = :first) "
            "where id = :key"
        ),
        values,
    )
    same = (
        "select 1 from limits as other where other.tenant_id = limits.tenant_id "
        "and other.scope = 'key' and other.unit = limits.unit "
        "and other.period_s = limits.period_s and other.target = :{} and other.limit_count {} "
        "limits.limit_count"
    )
    for mine, other, lower in (("key", "first", "<="), ("first", "key", "<")):
        connection.execute(
            sa.text(
                f"delete from limits where scope = 'key' and target = :{mine} "
                f"and exists ({same.format(other, lower)})"
            ),
            values,
        )
    for table, kind, target in _ATTACHED:
        connection.execute(
            sa.text(
                f"update {table} set {target} = :first where {kind} = 'key' and {target} = :key"
            ),
            values,
        )


def downgrade() -> None:
    for table, name, _kind in reversed(_COLUMNS):
        op.drop_column(table, name)
