"""Service roll-ups: usage by member and outcome, with latency and speed histograms."""

from datetime import datetime

from sqlalchemy import BigInteger, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.tables.columns import CURRENCY, ID, NAME, Amounts, Quantities
from core import lengths
from core.database import Base, Units, UtcDateTime

# Upper bounds of the histogram buckets; the last bucket of each is unbounded.
FIRST_TOKEN_MS = (50, 100, 150, 200, 300, 500, 750, 1_000, 2_000, 5_000, 10_000)
TOKENS_A_SECOND = (5, 10, 20, 30, 50, 75, 100, 150, 200, 400)
FIRST_COLUMNS = tuple(f"first_{index}" for index in range(len(FIRST_TOKEN_MS) + 1))
SPEED_COLUMNS = tuple(f"speed_{index}" for index in range(len(TOKENS_A_SECOND) + 1))


class _Service(Quantities, Amounts):
    """`first_N` counts responses by time to first token, `speed_N` by tokens per second after it."""

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the hour or day
    project_id: Mapped[str] = mapped_column(ID, primary_key=True)
    key_id: Mapped[str] = mapped_column(ID, primary_key=True)
    member_id: Mapped[str] = mapped_column(ID, primary_key=True)  # "" is none
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    adapter: Mapped[str] = mapped_column(NAME, primary_key=True)  # "" is none
    kind: Mapped[str] = mapped_column(String(20), primary_key=True)
    price_version: Mapped[str] = mapped_column(ID, primary_key=True)
    currency: Mapped[str] = mapped_column(CURRENCY)
    answers: Mapped[int] = mapped_column(BigInteger, default=0)  # any status
    refused: Mapped[int] = mapped_column(BigInteger, default=0)  # status 4xx
    failed: Mapped[int] = mapped_column(BigInteger, default=0)  # status 5xx
    queue_ms: Mapped[int] = mapped_column(BigInteger, default=0)
    reordered_cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    first_0: Mapped[int] = mapped_column(BigInteger, default=0)
    first_1: Mapped[int] = mapped_column(BigInteger, default=0)
    first_2: Mapped[int] = mapped_column(BigInteger, default=0)
    first_3: Mapped[int] = mapped_column(BigInteger, default=0)
    first_4: Mapped[int] = mapped_column(BigInteger, default=0)
    first_5: Mapped[int] = mapped_column(BigInteger, default=0)
    first_6: Mapped[int] = mapped_column(BigInteger, default=0)
    first_7: Mapped[int] = mapped_column(BigInteger, default=0)
    first_8: Mapped[int] = mapped_column(BigInteger, default=0)
    first_9: Mapped[int] = mapped_column(BigInteger, default=0)
    first_10: Mapped[int] = mapped_column(BigInteger, default=0)
    first_11: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_0: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_1: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_2: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_3: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_4: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_5: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_6: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_7: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_8: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_9: Mapped[int] = mapped_column(BigInteger, default=0)
    speed_10: Mapped[int] = mapped_column(BigInteger, default=0)


class DailyEngineTime(Base):
    """Busy time of engines by day, tenant, model, adapter and engine: what `billing.margin` prices."""

    __tablename__ = "engine_time_daily"

    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the day
    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    adapter: Mapped[str] = mapped_column(NAME, primary_key=True)  # "" is none
    engine_id: Mapped[str] = mapped_column(String(lengths.ENGINE), primary_key=True)
    currency: Mapped[str] = mapped_column(CURRENCY, primary_key=True)  # of the tenant's charges
    answers: Mapped[int] = mapped_column(BigInteger, default=0)
    busy_us: Mapped[int] = mapped_column(BigInteger, default=0)


class EnginePrice(Base):
    """What an hour of an engine costs the operator, from a day on until the pool's next price."""

    __tablename__ = "engine_prices"

    pool: Mapped[str] = mapped_column(NAME, primary_key=True)  # a pattern of engines' names
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of a day
    currency: Mapped[str] = mapped_column(CURRENCY)
    per_hour: Mapped[int] = mapped_column(Units)  # picounits
    note: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(NAME, default="")


class HourlyService(_Service, Base):
    __tablename__ = "service_hourly"


class DailyService(_Service, Base):
    __tablename__ = "service_daily"


_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")


class _Origin(Quantities, Amounts):
    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the day
    project_id: Mapped[str] = mapped_column(ID, primary_key=True)


class DailyEngineUsage(_Origin, Base):
    __tablename__ = "usage_engine_daily"

    engine_id: Mapped[str] = mapped_column(String(lengths.ENGINE), primary_key=True)


class DailyEndUserUsage(_Origin, Base):
    """A large tenant's month has a hundred thousand rows: what the page of usage shows of them is in an
    index."""

    __tablename__ = "usage_end_user_daily"
    __table_args__ = (
        Index(
            *("ix_usage_end_user_daily_shown", "tenant_id", "at", "end_user"),
            postgresql_include=("project_id", "requests", *_TOKENS),
        ),
    )

    end_user: Mapped[str] = mapped_column(String(lengths.END_USER), primary_key=True)  # "" is none
