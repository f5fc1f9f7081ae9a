"""Named operators with the role accountant, and the acts on money that they ask for and confirm."""

import sqlalchemy as sa
from alembic import op

from core.database import Json, Units, UtcDateTime

revision = "0020_money_acts"
down_revision = "0019_reported_events"
branch_labels = None
depends_on = None

_ROLE = "accountant"
_READS = (
    "tenant projects audit usage costs invoices budgets payments exports tenants prices operations "
    "money"
)


def upgrade() -> None:
    op.create_table(
        "operators",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("disabled_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_operators")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_operators_secret_sha256")),
    )
    op.add_column("dashboard_sessions", sa.Column("operator_name", sa.String(40), nullable=True))
    op.create_table(
        "money_acts",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("target", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount", Units(), nullable=False),
        sa.Column("terms", Json, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("requested_by", sa.String(40), nullable=False),
        sa.Column("requested_at", UtcDateTime(), nullable=False),
        sa.Column("decided_by", sa.String(40), nullable=True),
        sa.Column("decided_at", UtcDateTime(), nullable=True),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("result", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_money_acts")),
        sa.UniqueConstraint("reference", name=op.f("uq_money_acts_reference")),
    )
    op.create_index("ix_money_acts_status", "money_acts", ["status", "requested_at"])
    op.create_index("ix_money_acts_target", "money_acts", ["target"])
    _let_accountants_in()


def _let_accountants_in() -> None:
    """A policy that is stored already lacks the new role; an empty one gets it at the first start."""
    bind = op.get_bind()
    highest = bind.execute(sa.text("select max(id) from casbin_rule")).scalar()
    if highest is None:
        return
    rights = [(obj, "read") for obj in _READS.split()] + [("money", "write")]
    for number, (obj, act) in enumerate(rights, highest + 1):
        bind.execute(
            sa.text(
                "insert into casbin_rule (id, ptype, v0, v1, v2) "
                "values (:id, 'p', :role, :obj, :act)"
            ),
            {"id": number, "role": _ROLE, "obj": obj, "act": act},
        )


def downgrade() -> None:
    op.execute(sa.text("delete from casbin_rule where v0 = 'accountant'"))
    op.drop_table("money_acts")
    op.drop_column("dashboard_sessions", "operator_name")
    op.drop_table("operators")
