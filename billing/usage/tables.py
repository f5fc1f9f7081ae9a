"""Tables of usage events and engines' receipts, their sums, and closed and moved days."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Index,
    SmallInteger,
    String,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID, NAME, ORDERED_ID, Amounts, Quantities
from core import lengths
from core.database import Base, BigKey, Json, Units, UtcDateTime

WRONG = text("status >= 400")


class UsageBatch(Base):
    """The events of one shard in one bulk insert. Rating marks whole batches and never updates event
    rows."""

    __tablename__ = "usage_batches"
    __table_args__ = (
        Index("ix_usage_batches_rated_at_id", "rated_at", "id"),
        Index("ix_usage_batches_summed_at_id", "summed_at", "id"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    recorded_at: Mapped[datetime] = mapped_column(UtcDateTime)
    events: Mapped[int]
    shard: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    rated_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    summed_at: Mapped[datetime | None] = mapped_column(
        UtcDateTime
    )  # time it was added to the service roll-ups
    # Not all of its events were there when it was to be rated; None once they are.
    refused_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class UsageEventRow(Base):
    """One finished request. Append-only. On PostgreSQL partitioned by month of the request id."""

    __tablename__ = "usage_events"
    __table_args__ = (
        CheckConstraint("cached_tokens <= input_tokens", name="cached_within_input"),
        CheckConstraint(
            "cached_tokens >= 0 and output_tokens >= 0 and waived_tokens >= 0 and quantity >= 0",
            name="counts_not_negative",
        ),
        Index("ix_usage_events_batch", "batch_id"),
        Index("ix_usage_events_tenant_occurred", "tenant_id", "occurred_at"),
        # Partial index, to find the latest failed requests quickly.
        Index(
            "ix_usage_events_wrong",
            "tenant_id",
            "occurred_at",
            postgresql_where=WRONG,
            sqlite_where=WRONG,
        ),
        {"postgresql_partition_by": "RANGE (request_id)"},
    )

    request_id: Mapped[str] = mapped_column(ORDERED_ID, primary_key=True)
    batch_id: Mapped[int] = mapped_column(BigInteger)
    tenant_id: Mapped[str] = mapped_column(ID)
    project_id: Mapped[str] = mapped_column(ID)
    key_id: Mapped[str] = mapped_column(ID)
    kind: Mapped[str] = mapped_column(String(lengths.KIND))
    route: Mapped[str] = mapped_column(String(lengths.ROUTE))
    model: Mapped[str] = mapped_column(NAME)
    adapter: Mapped[str | None] = mapped_column(NAME)
    adapter_digest: Mapped[str | None] = mapped_column(String(lengths.DIGEST))
    price_version: Mapped[str] = mapped_column(ID)
    occurred_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime] = mapped_column(UtcDateTime)
    input_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    output_tokens: Mapped[int]
    waived_tokens: Mapped[int]
    finish_reason: Mapped[str] = mapped_column(String(lengths.FINISH_REASON))
    status: Mapped[int]
    settled_by: Mapped[str] = mapped_column(String(lengths.KIND))
    quantity: Mapped[int] = mapped_column(BigInteger)
    streamed: Mapped[bool]
    first_token_ms: Mapped[int | None]
    duration_ms: Mapped[int]
    queue_ms: Mapped[int]
    engine_id: Mapped[str] = mapped_column(String(lengths.ENGINE))
    member_id: Mapped[str | None] = mapped_column(ID)
    end_user: Mapped[str | None] = mapped_column(String(lengths.END_USER))
    client_request_id: Mapped[str | None] = mapped_column(String(lengths.CLIENT_REQUEST_ID))
    moderation: Mapped[str | None] = mapped_column(String(lengths.MODERATION))
    prompt_order: Mapped[str | None] = mapped_column(String(lengths.PROMPT_ORDER))
    reordered_cached_tokens: Mapped[int]
    truncated: Mapped[str | None] = mapped_column(String(lengths.TRUNCATED))
    batch_job: Mapped[str | None] = mapped_column(ID)
    routed: Mapped[str | None] = mapped_column(String(lengths.ROUTED))
    paid_by: Mapped[str | None] = mapped_column(String(lengths.PAID_BY))  # tenant or operator
    counted_by: Mapped[str | None] = mapped_column(String(lengths.COUNTED_BY))
    busy_us: Mapped[int] = mapped_column(BigInteger, server_default="0")
    units: Mapped[int] = mapped_column(BigInteger, server_default="0")
    components: Mapped[str | None] = mapped_column(String(lengths.COMPONENTS))
    labels: Mapped[str | None] = mapped_column(String(lengths.LABELS))


class ParkedEvent(Base):
    """An event that cannot be rated, kept with the reason until it is released or dismissed."""

    __tablename__ = "parked_events"

    request_id: Mapped[str] = mapped_column(ORDERED_ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    code: Mapped[str] = mapped_column(String(40))  # future, unknown_price, currency, invalid, clash
    reason: Mapped[str] = mapped_column(Text)
    payload: Mapped[dict[str, Any]] = mapped_column(Json)
    parked_at: Mapped[datetime] = mapped_column(UtcDateTime)
    released_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    dismissed_by: Mapped[str | None] = mapped_column(NAME)


class ReportedEvent(Base):
    """A CloudEvent of usage that Tollhouse did not serve, by source and id, with its usage event.
    Append-only. The ids of an organisation's own events and the operator's do not meet."""

    __tablename__ = "reported_events"

    reporter: Mapped[str] = mapped_column(ID, primary_key=True)  # the tenant; "": the operator
    source: Mapped[str] = mapped_column(String(lengths.EVENT_SOURCE), primary_key=True)
    event_id: Mapped[str] = mapped_column(String(lengths.CLIENT_REQUEST_ID), primary_key=True)
    request_id: Mapped[str] = mapped_column(ORDERED_ID)
    tenant_id: Mapped[str] = mapped_column(ID)
    digest: Mapped[str] = mapped_column(String(lengths.DIGEST))
    reported_by: Mapped[str] = mapped_column(ID)
    reported_at: Mapped[datetime] = mapped_column(UtcDateTime)


class UsageRetention(Base):
    """Retention record: events with ids below `floor_id` are dropped, and replays are parked."""

    __tablename__ = "usage_retention"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    floor_id: Mapped[str] = mapped_column(ORDERED_ID)
    kept_from: Mapped[datetime] = mapped_column(UtcDateTime)
    events: Mapped[int] = mapped_column(BigInteger)
    dropped_at: Mapped[datetime] = mapped_column(UtcDateTime)


class EngineReceipt(Base):
    """An engine's own token counts of a prompt, compared by the audit. Append-only. Receipts reach this
    table by a way of their own, as they arrive; several replicas may have run the same request."""

    __tablename__ = "engine_receipts"
    __table_args__ = ({"postgresql_partition_by": "RANGE (request_id)"},)

    # By which the engine knows it: of several prompts, the number follows a dot.
    request_id: Mapped[str] = mapped_column(ORDERED_ID, primary_key=True)
    engine_id: Mapped[str] = mapped_column(String(lengths.ENGINE), primary_key=True)
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    generated_tokens: Mapped[int]
    received_at: Mapped[datetime] = mapped_column(UtcDateTime)
    busy_us: Mapped[int] = mapped_column(BigInteger, server_default="0")


class Charge(Quantities, Amounts, Base):
    """The cost of one event by component, and its ledger transaction. Append-only."""

    __tablename__ = "charges"
    __table_args__ = (
        Index("ix_charges_transaction", "transaction_id"),
        Index("ix_charges_bill_period", "bill_period_id"),
        {"postgresql_partition_by": "RANGE (request_id)"},
    )

    request_id: Mapped[str] = mapped_column(ORDERED_ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    price_version: Mapped[str] = mapped_column(ID)
    currency: Mapped[str] = mapped_column(CURRENCY)
    usage_period_id: Mapped[str] = mapped_column(ID)  # period of the time of use
    bill_period_id: Mapped[str] = mapped_column(ID)  # period of the invoice; later for late events
    transaction_id: Mapped[str] = mapped_column(ID)


class _Rollup(Quantities, Amounts):
    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the hour or day
    project_id: Mapped[str] = mapped_column(ID, primary_key=True)
    key_id: Mapped[str] = mapped_column(ID, primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    adapter: Mapped[str] = mapped_column(NAME, primary_key=True)  # "" is none
    kind: Mapped[str] = mapped_column(String(20), primary_key=True)
    price_version: Mapped[str] = mapped_column(ID, primary_key=True)
    usage_period_id: Mapped[str] = mapped_column(ID, primary_key=True)
    bill_period_id: Mapped[str] = mapped_column(ID, primary_key=True)
    currency: Mapped[str] = mapped_column(CURRENCY)


class HourlyUsage(_Rollup, Base):
    __tablename__ = "usage_hourly"


class DailyUsage(_Rollup, Base):
    __tablename__ = "usage_daily"
    __table_args__ = (
        Index("ix_usage_daily_bill_period", "bill_period_id"),
        Index("ix_usage_daily_at", "at"),  # for queries over all tenants
    )


class HourlyLabelUsage(_Rollup, Base):
    """Usage that has labels, by hour and by the set of them in its canonical form."""

    __tablename__ = "usage_label_hourly"
    __table_args__ = (Index("ix_usage_label_hourly_bill_period", "bill_period_id"),)

    labels: Mapped[str] = mapped_column(String(lengths.LABELS), primary_key=True)


class LabelSet(Base):
    """A set of labels that a tenant's requests have had. Their number is bounded: what is beyond it is
    counted as `other`."""

    __tablename__ = "label_sets"

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    labels: Mapped[str] = mapped_column(String(lengths.LABELS), primary_key=True)
    first_at: Mapped[datetime] = mapped_column(UtcDateTime)


class DailyTenantUsage(Base):
    """Daily usage by tenant, model and currency, for pages that cover all tenants."""

    __tablename__ = "usage_tenant_daily"

    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the day
    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    currency: Mapped[str] = mapped_column(CURRENCY, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    input_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    amount: Mapped[int] = mapped_column(Units)


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
    """Busy time by day, tenant, model, adapter and engine, which `billing.reports.margin` prices."""

    __tablename__ = "engine_time_daily"

    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the day
    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    model: Mapped[str] = mapped_column(NAME, primary_key=True)
    adapter: Mapped[str] = mapped_column(NAME, primary_key=True)  # "" is none
    engine_id: Mapped[str] = mapped_column(String(lengths.ENGINE), primary_key=True)
    currency: Mapped[str] = mapped_column(CURRENCY, primary_key=True)  # of the tenant's charges
    answers: Mapped[int] = mapped_column(BigInteger, default=0)
    busy_us: Mapped[int] = mapped_column(BigInteger, default=0)


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


class ClosedDay(Base):
    """Sums of the usage that was recorded on one day (UTC), frozen. Append-only. `digest` covers the
    row, its frozen groups and the digest of the day before, so that a changed row breaks the chain;
    `signature` signs the digest with a key that the database does not hold."""

    __tablename__ = "closed_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # its start
    last_batch: Mapped[int] = mapped_column(
        BigInteger
    )  # the last one recorded on or before the day
    sums: Mapped[dict[str, Any]] = mapped_column(Json)
    # last_entry, last_use: up to which ledger entries and credit uses are frozen; seen_entry,
    # seen_use: the last ones when the day was closed; groups: digest of the frozen groups.
    frozen: Mapped[dict[str, Any]] = mapped_column(Json)
    digest: Mapped[str] = mapped_column(String(lengths.DIGEST))
    signature: Mapped[str] = mapped_column(String(100))  # "" or "key id:hex"
    closed_at: Mapped[datetime] = mapped_column(UtcDateTime)


class MovedDay(Base):
    """A closed day whose events and charges the store of moved days has, verified. They are read from
    there, and dropped here some time later. Its batches are those after `after_batch` up to
    `last_batch`."""

    __tablename__ = "moved_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    after_batch: Mapped[int] = mapped_column(BigInteger)
    last_batch: Mapped[int] = mapped_column(BigInteger)
    store: Mapped[str] = mapped_column(String(100))  # the identity of the store
    floor_id: Mapped[str] = mapped_column(ORDERED_ID)  # its requests have ids before this one
    moved_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # None: it is being copied
    dropped_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Adjustment(Base):
    """A correction of rated usage without an event: re-rating, goodwill. Append-only."""

    __tablename__ = "adjustments"
    __table_args__ = (Index("ix_adjustments_bill_period", "bill_period_id"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    rerate_id: Mapped[str | None] = mapped_column(ID)
    tenant_id: Mapped[str] = mapped_column(ID)
    project_id: Mapped[str] = mapped_column(ID, default="")
    model: Mapped[str] = mapped_column(NAME, default="")
    component: Mapped[str] = mapped_column(String(20), default="")
    quantity: Mapped[int] = mapped_column(BigInteger, default=0)
    currency: Mapped[str] = mapped_column(CURRENCY)
    amount: Mapped[int] = mapped_column(Units)
    usage_period_id: Mapped[str] = mapped_column(ID)
    bill_period_id: Mapped[str] = mapped_column(ID)
    transaction_id: Mapped[str] = mapped_column(ID)
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
