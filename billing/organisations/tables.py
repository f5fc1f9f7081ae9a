"""Table of the links between organisations."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import ID
from core.database import Base, UtcDateTime


class OrganisationLink(Base):
    """The parent of a tenant, which sees its usage, and who pays for it."""

    __tablename__ = "organisation_links"
    __table_args__ = (
        CheckConstraint("tenant_id <> parent_id", name="not_its_own_parent"),
        Index("ix_organisation_links_parent", "parent_id"),
    )

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    parent_id: Mapped[str] = mapped_column(ID)
    pays: Mapped[str] = mapped_column(String(10))  # parent | self
    markup_ppm: Mapped[int] = mapped_column(BigInteger, default=0)  # on the child's charges
    since: Mapped[datetime] = mapped_column(UtcDateTime)  # the parent sees usage from this day on
    changed_by: Mapped[str] = mapped_column(ID)
