"""The seller's profile, and the issuer that each final invoice states."""

import sqlalchemy as sa
from alembic import op

from core.database import Json

revision = "0016_seller_profile"
down_revision = "0015_subscription_terms"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("bank_details", "footer"):
        op.add_column("sellers", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    op.add_column("sellers", sa.Column("logo", sa.LargeBinary(), nullable=True))
    op.add_column("invoices", sa.Column("issued_by", Json, nullable=False, server_default="{}"))
    _state_the_issuer()


def _state_the_issuer() -> None:
    """Of final invoices, which have shown the seller as it is now."""
    bind = op.get_bind()
    found = bind.execute(sa.text("select id, name, address, tax_id from sellers")).all()
    invoices = sa.table(
        "invoices", sa.column("issued_by", Json), sa.column("seller_id"), sa.column("number")
    )
    for seller_id, name, address, tax_id in found:
        profile = {
            "name": name,
            "address": address,
            "tax_id": tax_id,
            "bank_details": "",
            "footer": "",
        }
        bind.execute(
            invoices.update()
            .where(invoices.c.seller_id == seller_id, invoices.c.number.is_not(None))
            .values(issued_by=profile)
        )


def downgrade() -> None:
    op.drop_column("invoices", "issued_by")
    for name in ("logo", "footer", "bank_details"):
        op.drop_column("sellers", name)
