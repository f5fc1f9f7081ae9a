"""Tables of the shards of tenants and of the workers that lease them for rating."""

from datetime import datetime

from sqlalchemy import SmallInteger
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import ID
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
