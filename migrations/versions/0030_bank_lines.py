"""Lines of bank statements; payment reference, terms and methods of accounts."""

from hashlib import sha256

import sqlalchemy as sa
from alembic import op

from core.database import Json, UtcDateTime

revision = "0030_bank_lines"
down_revision = "0029_prompt_templates"
branch_labels = None
depends_on = None
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_COLUMNS = ("payment_reference", "payment_terms_days", "payment_methods")


def _reference(tenant_id: str) -> str:
    number = int.from_bytes(sha256(tenant_id.encode()).digest()[:8])
    payload = "C" + "".join(_ALPHABET[number >> 5 * place & 31] for place in range(12))
    digits = int("".join(str(int(each, 36)) for each in payload + "RF00"))
    return f"RF{98 - digits % 97:02d}{payload}"


def upgrade() -> None:
    op.create_table(
        "bank_lines",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("account", sa.String(length=40), nullable=False),
        sa.Column("bank_id", sa.String(length=140), nullable=False),
        sa.Column("booked_on", sa.Date(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("payer", sa.String(length=200), nullable=False),
        sa.Column("payer_account", sa.String(length=40), nullable=False),
        sa.Column("reference", sa.String(length=140), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("acts", Json, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("imported_at", UtcDateTime(), nullable=False),
        sa.Column("imported_by", sa.String(length=40), nullable=False),
        sa.Column("decided_by", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bank_lines")),
        sa.UniqueConstraint("account", "bank_id", name=op.f("uq_bank_lines_account_bank_id")),
    )
    op.create_index("ix_bank_lines_status", "bank_lines", ["status", "booked_on"])
    for column in (
        sa.Column("payment_reference", sa.String(length=25), nullable=True),
        sa.Column("payment_terms_days", sa.Integer(), nullable=True),
        sa.Column("payment_methods", Json, nullable=True),
    ):
        op.add_column("billing_accounts", column)
    accounts = sa.table("billing_accounts", sa.column("tenant_id"), sa.column("payment_reference"))
    connection = op.get_bind()
    for (tenant_id,) in connection.execute(sa.select(accounts.c.tenant_id)).all():
        connection.execute(
            accounts.update()
            .where(accounts.c.tenant_id == tenant_id)
            .values(payment_reference=_reference(tenant_id))
        )
    op.create_index(
        "ix_billing_accounts_payment_reference", "billing_accounts", ["payment_reference"]
    )


def downgrade() -> None:
    op.drop_index("ix_billing_accounts_payment_reference", "billing_accounts")
    for name in _COLUMNS:
        op.drop_column("billing_accounts", name)
    op.drop_table("bank_lines")
