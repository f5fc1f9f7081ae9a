"""Whatever cannot be rated is parked alone: every shape of price at its limits, on both databases."""

from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import pytest
from sqlalchemy import select, text

from billing.accounts.tables import BillingAccount
from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.ledger.ledger import AccountKind, balance
from billing.ledger.tables import LedgerAccount
from billing.pricing import prices
from billing.pricing.tables import PriceVersionRow
from billing.rating import rating
from billing.rating.rating_worker import rate_all
from billing.usage import rollups, usage
from billing.usage.tables import Charge
from core.bulk_insert import upsert_sums
from core.database import AmountTooLarge
from core.events import UsageKind
from tests.billing.conftest import Deployment

NONE = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
MOST_TOKENS, MOST_COUNT = 2**31 - 1, 10**15  # what an event may count
HOLDS = {"sqlite": 2**63 - 1, "postgresql": 10**38 - 1}
GPU, MODERATION = {"kind": UsageKind.GPU_SECONDS}, {"kind": UsageKind.MODERATION}
AUDIO, IMAGE, SPEECH = (
    {"kind": kind, "quantity": 0} for kind in (UsageKind.AUDIO, UsageKind.IMAGE, UsageKind.SPEECH)
)
ADAPTER = {"adapter": "pirate"}


def tiers(scheme: str, price: str, **more: str) -> dict[str, Any]:
    return {
        "scheme": scheme,
        "tiers": [{"up_to": 1000, "price": price, **more}, {"up_to": None, "price": price, **more}],
    }


def package(size: int, price: str) -> dict[str, Any]:
    return {"scheme": "package", "size": size, "price": price}


# Terms at the limit of what is accepted, the event's fields, the field that counts, its most, and the
# price by hand of a quantity: per unit, units a package, flat parts up to and above 1,000 units.
PER_TOKEN, PER_UNIT, FLAT = Fraction(1, 100), Fraction(100_000), 100_000
SHAPES: list[tuple[dict[str, Any], dict[str, Any], str, int, Fraction, int, tuple[int, int]]] = [
    ({"input": "10000"}, {}, "input_tokens", MOST_TOKENS, PER_TOKEN, 1, (0, 0)),
    ({"output": "10000"}, {}, "output_tokens", MOST_TOKENS, PER_TOKEN, 1, (0, 0)),
    ({"waived": "10000"}, {}, "waived_tokens", MOST_TOKENS, PER_TOKEN, 1, (0, 0)),
    ({"request": "100000"}, {}, "quantity", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"adapter": "100000"}, ADAPTER, "quantity", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"gpu_second": "100000"}, GPU, "quantity", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"moderation": "100000"}, MODERATION, "quantity", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"audio_second": "100000"}, AUDIO, "units", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"image": "100000"}, IMAGE, "units", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"character": "10000"}, SPEECH, "units", MOST_COUNT, PER_TOKEN, 1, (0, 0)),
    ({"request": package(1, "100000")}, {}, "quantity", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"image": package(7, "100000")}, IMAGE, "units", MOST_COUNT, PER_UNIT, 7, (0, 0)),
    (
        {"output": package(1000, "10000")},
        {},
        "output_tokens",
        MOST_TOKENS,
        Fraction(10_000),
        1000,
        (0, 0),
    ),
    (
        {"output": tiers("graduated", "10000", flat="100000")},
        {},
        "output_tokens",
        MOST_TOKENS,
        PER_TOKEN,
        1,
        (FLAT, 2 * FLAT),
    ),
    (
        {"gpu_second": tiers("graduated", "100000", flat="100000")},
        GPU,
        "quantity",
        MOST_COUNT,
        PER_UNIT,
        1,
        (FLAT, 2 * FLAT),
    ),
    ({"image": tiers("volume", "100000")}, IMAGE, "units", MOST_COUNT, PER_UNIT, 1, (0, 0)),
    ({"input": tiers("volume", "10000")}, {}, "input_tokens", MOST_TOKENS, PER_TOKEN, 1, (0, 0)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[2]}-{shape[0]}"[:60])
def test_every_shape_of_price_at_its_limits(deployment: Deployment, shape: Any) -> None:
    written, fields, counted, most, unit, size, flats = shape
    made, held = deployment, HOLDS[deployment.database.dialect]
    made.tenant("plain")
    version = made.price(written, model="big")
    small = made.event(price_version=version.id, model="big", **(NONE | fields | {counted: 3}))
    large = made.event(price_version=version.id, model="big", **(NONE | fields | {counted: most}))
    plain = made.event(tenant_id="plain")
    made.record(small, large, plain)
    rate_all(made.database, made.clock)

    def _priced(quantity: int) -> int:
        flat = 0 if not quantity else flats[1] if quantity > 1000 else flats[0]
        return int(((-(-quantity // size)) * unit + flat) * 10**12)

    whole = _priced(3 + most)
    stored = whole <= held
    first = int(_priced(3))
    with made.database.read() as session:
        charged = dict(session.execute(select(Charge.request_id, Charge.amount)).all())
        parked = {row.request_id: row for row in usage.parked(session)}
        assert charged.pop(plain.request_id) == 80 * 150_000 + 20 * 75_000 + 50 * 600_000
        assert set(charged) == {
            each.request_id for each in ((small, large) if stored else (small,))
        }
        assert sum(charged.values()) == (
            whole if stored else first
        )  # tiers are reached in any order
        assert set(parked) == (set() if stored else {large.request_id})
        assert balance(session, "acme", AccountKind.REVENUE, "USD") == -sum(charged.values())
        report = reconcile.audit(session)
        assert (report.differences, report.parked) == ((), len(parked))
    for event in parked.values():
        assert event.code == "amount_too_large" and "more than the database can add" in event.reason


def _absurd_price(made: Deployment) -> dict[str, Any]:
    """One that was saved before its limit was."""
    with made.database.transaction() as session:
        row = session.get_one(PriceVersionRow, made.price({"request": "1"}, model="old").id)
        request = {"scheme": "package", "tiers": [[None, 10**40, 0]], "package": 1, "free": 0}
        row.terms = {"discount_ppm": 0, "rates": {"request": request}}
    return {"price_version": row.id, "model": "old"}


def _broken_terms(made: Deployment) -> dict[str, Any]:
    with made.database.transaction() as session:
        row = session.get_one(PriceVersionRow, made.price({"request": "1"}, model="old").id)
        row.terms = {"discount_ppm": 0, "rates": {"request": {"scheme": "unknown"}}}
    return {"price_version": row.id, "model": "old"}


def _time_before_all(made: Deployment) -> dict[str, Any]:
    made.tenant("east", timezone="Asia/Tokyo")
    return {"tenant_id": "east", "occurred_at": datetime(1, 1, 1, tzinfo=UTC)}


def _unknown_zone(made: Deployment) -> dict[str, Any]:
    made.tenant("nowhere")
    with made.database.transaction() as session:
        session.get_one(BillingAccount, "nowhere").timezone = "Europe/Atlantis"
    return {"tenant_id": "nowhere"}


def _too_many(_made: Deployment) -> dict[str, Any]:
    return {"kind": UsageKind.GPU_SECONDS, "quantity": MOST_COUNT + 1, **NONE}


def _full_account(made: Deployment) -> dict[str, Any]:
    """The tenant's account is at its last unit."""
    made.tenant("full")
    with made.database.transaction() as session:
        most = HOLDS[made.database.dialect]
        session.add(
            LedgerAccount(tenant_id="full", kind="revenue", currency="USD", balance=1 - most)
        )
    return {"tenant_id": "full"}


@pytest.mark.parametrize(
    ("cause", "code", "reason"),
    [
        (_absurd_price, "amount_too_large", "more than the database can add"),
        (_broken_terms, "unratable", "'unknown' is not a valid Scheme"),
        (_time_before_all, "unratable", "OverflowError"),
        (_unknown_zone, "unratable", "Atlantis"),
        (_too_many, "invalid", "quantity is 1000000000000001; it must be 0 to 1000000000000000"),
        (_full_account, "", ""),
    ],
)
def test_one_event_that_cannot_be_rated_is_parked_and_all_others_go_on(
    deployment: Deployment, cause: Any, code: str, reason: str
) -> None:
    made = deployment
    bad = made.event(**cause(made))
    names = [f"t{number}" for number in range(6)]
    for name in names:
        made.tenant(name)
    good = [made.event(tenant_id=name) for name in (*names, *names, "acme")]
    made.record(*good[:7], bad, *good[7:])
    rate_all(made.database, made.clock)
    with made.database.read() as session:
        charged = dict(session.execute(select(Charge.request_id, Charge.amount)).all())
        assert set(charged) == {event.request_id for event in good}
        assert set(charged.values()) == {80 * 150_000 + 20 * 75_000 + 50 * 600_000}
        (parked,) = usage.parked(session)
        assert parked.request_id == bad.request_id
        assert code in parked.code and reason in parked.reason
        if bad.tenant_id != "full":  # the account of that one was made by hand
            assert reconcile.audit(session).differences == ()
    made.clock.advance(days=40)
    run = invoice_run.run(made.database, made.clock, names)
    assert run.failed == {} and len(run.finalised) == 6
    with made.database.transaction() as session:  # a retry finds the same and delays nobody
        assert rating.release_stored(session, made.clock) == 0


def test_what_was_parked_is_rated_once_when_its_cause_is_gone(deployment: Deployment) -> None:
    made = deployment
    bad = [made.event(**_unknown_zone(made)), made.event(tenant_id="nowhere")]
    made.record(*bad, made.event())
    rate_all(made.database, made.clock)
    with made.database.transaction() as session:
        assert len(usage.parked(session)) == 2
        session.get_one(BillingAccount, "nowhere").timezone = "Europe/Vienna"
    for expected in (2, 0):
        with made.database.transaction() as session:
            assert rating.release_stored(session, made.clock) == expected
    with made.database.read() as session:
        assert usage.parked(session) == []
        assert reconcile.audit(session).clean


def test_a_sum_beyond_sqlite_is_an_error_and_never_a_float(lite: Deployment) -> None:
    made = lite
    with made.database.transaction() as session:
        prices.ensure_default_prices(session, made.clock, "demo")
    row = ("2026-01-01", "acme", "demo", "USD", 1, 0, 0, 0, 2**62)
    columns = (*rollups.TENANT_DAILY_KEY, *rollups.TENANT_DAILY_SUMS)
    upsert = (rollups.TENANT_DAILY, columns, [row])
    rule = (rollups.TENANT_DAILY_KEY, rollups.TENANT_DAILY_SUMS)
    with made.database.transaction() as session:
        upsert_sums(session, *upsert, *rule)
    with pytest.raises(AmountTooLarge), made.database.transaction() as session:
        upsert_sums(session, *upsert, *rule)
    with made.database.read() as session:
        found = session.execute(text("select typeof(amount), amount from usage_tenant_daily"))
        assert found.all() == [("integer", 2**62)]
