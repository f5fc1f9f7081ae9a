"""Tables of the shards of tenants, tier positions and re-ratings."""

from datetime import datetime

from sqlalchemy import BigInteger, SmallInteger, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import ID, NAME
from core.database import Base, UtcDateTime


class RatingShard(Base):
    """The lease of a shard. A rating transaction locks the rows of its shards until it ends."""

    __tablename__ = "rating_shards"

    shard: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    worker: Mapped[str | None] = mapped_column(ID)
    leased_until: Mapped[datetime | None] = mapped_column(UtcDateTime)


class RatingWorker(Base):
    """A worker that rates at present; the shards are shared between those whose time is not over."""

    __tablename__ = "rating_workers"

    worker: Mapped[str] = mapped_column(ID, primary_key=True)
    alive_until: Mapped[datetime] = mapped_column(UtcDateTime)


class TierPosition(Base):
    """Quantity of a component that a tenant has used in a period under a non-linear price.

    Rating updates it once per batch under the tenant's lock, so that charges sum to the price of
    the total quantity.
    """

    __tablename__ = "tier_positions"

    usage_period_id: Mapped[str] = mapped_column(ID, primary_key=True)
    price_version: Mapped[str] = mapped_column(ID, primary_key=True)
    component: Mapped[str] = mapped_column(String(20), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    quantity: Mapped[int] = mapped_column(BigInteger)


class Rerate(Base):
    """A re-rating of events from a wrong price version to the right one."""

    __tablename__ = "rerates"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    from_version: Mapped[str] = mapped_column(ID)
    to_version: Mapped[str] = mapped_column(ID)
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant_id: Mapped[str] = mapped_column(ID, default="")  # "" is every tenant
    posted_at: Mapped[datetime] = mapped_column(UtcDateTime)
    posted_by: Mapped[str] = mapped_column(NAME, default="")
    note: Mapped[str] = mapped_column(Text, default="")
