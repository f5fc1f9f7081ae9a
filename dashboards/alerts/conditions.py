"""Whether an alert's condition holds now, by what the pages can read: the database, the metrics of the
gateway that answers, its engines' heartbeats, and the requests of the last minutes.

Prometheus sees all processes and their history, so it alone raises alerts. Where a condition needs that,
the page says so instead of guessing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from billing.reports import measures
from billing.usage.tables import FIRST_TOKEN_MS
from dashboards import traffic
from dashboards.alerts.alert import Alert
from dashboards.backend import DashboardBackend
from dashboards.traffic import Traffic

_SHORT, _LONG = timedelta(minutes=5), timedelta(minutes=10)
_SLO_CLASSES = FIRST_TOKEN_MS.index(300) + 1  # of first-token times within the SLO
_DATABASE, _GATEWAY = "database", "this gateway alone"
_HEARTBEATS = "engines' heartbeats"


@dataclass(frozen=True, slots=True)
class Reading:
    holds: bool | None  # None: not evaluated here
    value: float | None  # of the alert's measure; None: there is nothing to measure, or not here
    source: str  # what it was read from, or why it was not


@dataclass(frozen=True, slots=True)
class Figures:
    stored: Mapping[str, float]  # gauges of the database, by metric
    own: Mapping[str, Sequence[float]]  # gauges of this gateway's processes, by metric
    waiting: int
    kv_shares: Sequence[float]
    last_5: Traffic
    last_10: Traffic
    has_stream: bool


def figures(session: Session, now: datetime, backend: DashboardBackend) -> Figures:
    engines = backend.engines()
    settings = {each.name: each.value for each in backend.configuration()}
    return Figures(
        measures.read(session, now, int(settings["TOLLHOUSE_EVENTS_DAYS"])),
        backend.gauges(),
        sum(each.waiting for each in engines),
        [each.kv_share for each in engines if each.kv_share is not None],
        traffic.total(traffic.read(session, now - _SHORT, now)),
        traffic.total(traffic.read(session, now - _LONG, now)),
        settings.get("TOLLHOUSE_STREAM_URL", "") not in ("", "None"),
    )


def reading(alert: Alert, found: Figures) -> Reading:
    if alert.name in _NOT_HERE:
        return Reading(None, None, _NOT_HERE[alert.name])
    if alert.name == "StreamStuck":
        if found.has_stream:
            return Reading(None, None, "The processes that empty the stream measure its age.")
        return Reading(False, None, "no stream is used")
    source, measured = _MEASURES[alert.name]
    value = measured(found)
    return Reading(value is not None and alert.holds(value), value, source)


def _stored(name: str) -> tuple[str, Callable[[Figures], float | None]]:
    return _DATABASE, lambda found: found.stored[name]


def _own(*names: str) -> tuple[str, Callable[[Figures], float | None]]:
    """The sum over the metrics, of the largest value of each."""
    return _GATEWAY, lambda found: sum(max(found.own.get(name, ()), default=0.0) for name in names)


def _first_token_s(found: Figures) -> float | None:
    p95 = found.last_5.first_token_ms(0.95)
    return None if p95 is None else p95 / 1000


def _goodput(found: Figures) -> float | None:
    counts = found.last_10.first_token
    return sum(counts[:_SLO_CLASSES]) / sum(counts) if sum(counts) else None


def _failed_share(found: Figures) -> float | None:
    return found.last_5.failed / found.last_5.requests if found.last_5.requests else None


_MEASURES: dict[str, tuple[str, Callable[[Figures], float | None]]] = {
    "FirstTokenSlow": ("requests of 5 minutes", _first_token_s),
    "GoodputLow": ("requests of 10 minutes", _goodput),
    "ErrorRateHigh": ("requests of 5 minutes", _failed_share),
    "QueueDeep": (_HEARTBEATS, lambda found: found.waiting),
    "KvCacheFull": (_HEARTBEATS, lambda found: max(found.kv_shares, default=None)),
    "LimitsNotShared": _own("tollhouse_limit_mode"),
    "ModelNotServed": _own("tollhouse_model_unserved"),
    "BreakerOpen": _own("tollhouse_breaker_open"),
    "SpoolStuck": _own("tollhouse_spool_age_seconds"),
    "SpoolParked": _own("tollhouse_spool_parked_records", "tollhouse_spool_parked_adopted_records"),
    "RatingLate": _stored("tollhouse_unrated_age_seconds"),
    "AuditLate": _stored("tollhouse_audit_age_seconds"),
    "DatabaseBehind": _stored("tollhouse_database_behind"),
    "ReconciliationOff": _stored("tollhouse_audit_differences"),
    "EventsParked": _stored("tollhouse_parked_events"),
    "ClickHouseDown": _stored("tollhouse_clickhouse_down"),
    "DaysNotMoved": _stored("tollhouse_unmoved_age_seconds"),
    "ExportsParked": _stored("tollhouse_parked_exports"),
    "DeadLetters": _stored("tollhouse_dead_letters_waiting"),
}
_NOT_HERE = {
    "PrefixHitRateLow": "Prometheus has the engines' counters of the last hour.",
    "ThroughputGone": "Prometheus has the engines' counters of the last minutes.",
    "AdapterQuarantined": "Prometheus has the gateways' counters of the last hour.",
    "RequestsLost": "Prometheus has the gateways' counters of the last minutes.",
    "ConnectionsSilent": "Prometheus has the counters of gateways and workers of the last minutes.",
    "TargetDown": "Only Prometheus knows what it scrapes.",
    "WorkerSilent": "The workers measure it.",
    "DatabaseUnreachable": "This page has read the database; only Prometheus knows what it scrapes.",
    "InvoicesFailed": "The workers count it.",
    "TenantsLeftOut": "The workers count it.",
}
