"""A correction of an earlier month is settled with that month's plan, not with the current month's."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select

from billing.invoicing import invoice_run, invoices
from billing.invoicing.tables import Invoice
from billing.rating import rerating
from billing.reports.subscription_views import subscriptions_json
from billing.subscriptions import subscriptions
from core.money import units_of
from tests.billing.conftest import Deployment
from tests.billing.exports.test_exports import focus
from tests.billing.invoicing.test_invoices import clean
from tests.billing.subscriptions.test_plans import plan, subscribe

JANUARY, FEBRUARY = (datetime(2026, month, 1, tzinfo=UTC) for month in (1, 2))
Amounts = dict[str, str]


def use(deployment: Deployment, day: datetime, version: str, dollars: int) -> None:
    deployment.clock.set(day)
    million = {"input_tokens": 0, "cached_tokens": 0, "waived_tokens": 0}
    tokens = dollars * 100_000  # at ten dollars a million
    deployment.record(
        deployment.event(model="slip", price_version=version, output_tokens=tokens, **million)
    )
    deployment.rate()


def final(deployment: Deployment, month: int, year: int = 2026) -> Amounts:
    """Amounts of the invoice that is final on the third of the month, by kind of line."""
    deployment.clock.set(datetime(year, month, 3, tzinfo=UTC))
    one = invoice_run.run(deployment.database, deployment.clock, current=False).finalised[-1]
    with deployment.database.read() as session:
        sums: dict[str, int] = {}
        for line in invoices.lines_of(session, one):
            sums[line.kind] = sums.get(line.kind, 0) + line.amount_minor
        total = session.get_one(Invoice, one).total_minor
    clean(deployment)
    assert sum(sums.values()) == total
    return {kind: f"{minor / 100:.2f}" for kind, minor in sums.items()}


def corrected(
    deployment: Deployment, used: tuple[int, int], right: str, **terms: Any
) -> tuple[Amounts, Amounts]:
    """Invoices of January, and of February with the correction of January to the right price."""
    wrong = deployment.price({"output": "10"}, model="slip")
    plan(deployment, "pro", **{name: units_of(amount) for name, amount in terms.items()})
    subscribe(deployment, "pro")
    if used[0]:
        use(deployment, JANUARY.replace(day=10), wrong.id, used[0])
    january = final(deployment, 2)
    use(deployment, FEBRUARY.replace(day=10), wrong.id, used[1])
    price = deployment.price({"output": right}, model="slip")
    with deployment.database.transaction() as session:
        wanted = rerating.Request(wrong.id, price.id, JANUARY, FEBRUARY)
        rerating.post_all(session, deployment.clock, wanted)
        (shown,) = subscriptions_json(session, "acme", deployment.clock.now())
    if "minimum_commitment" in terms:
        assert shown["commitment"]["used"]["units"] == str(units_of(str(used[1])))
    return january, final(deployment, 3)


# Used in January and February at ten dollars; the right price; the plan's terms; both invoices.
STORIES = (
    # January was above its commitment before and after: all of the $15 returns.
    (
        (30, 5),
        "5",
        {"minimum_commitment": "10"},
        {"usage": "30.00"},
        {"usage": "5.00", "adjustment": "-15.00", "commitment": "5.00"},
    ),
    # January falls from $14 to $7, below its commitment of $10: $4 return, $3 become its shortfall.
    (
        (14, 12),
        "5",
        {"minimum_commitment": "10"},
        {"usage": "14.00"},
        {"usage": "12.00", "adjustment": "-7.00", "commitment": "3.00"},
    ),
    # January paid its shortfall of $4; a dearer price of $9 takes $3 of it back.
    (
        (6, 12),
        "15",
        {"minimum_commitment": "10"},
        {"usage": "6.00", "commitment": "4.00"},
        {"usage": "12.00", "adjustment": "3.00", "commitment": "-3.00"},
    ),
    # January's usage was included, so that nothing was paid and nothing returns.
    (
        (8, 5),
        "5",
        {"included_usage": "10"},
        {"usage": "8.00", "included": "-8.00"},
        {"usage": "5.00", "adjustment": "-4.00", "included": "-1.00"},
    ),
)


@pytest.mark.parametrize(("used", "right", "terms", "january", "february"), STORIES)
def test_a_correction_changes_the_total_by_what_it_changes_of_its_own_month(
    deployment: Deployment,
    used: tuple[int, int],
    right: str,
    terms: dict[str, str],
    january: Amounts,
    february: Amounts,
) -> None:
    assert corrected(deployment, used, right, **terms) == (january, february)


def test_what_a_correction_moves_is_a_correction_in_the_export_too(lite: Deployment) -> None:
    corrected(lite, (14, 12), "5", minimum_commitment="10")
    rows = focus(lite)
    moved = [row for row in rows if row["x_LineKind"] == "commitment"]
    assert [row["ChargeClass"] for row in moved] == ["Correction"]
    assert sum(row["BilledCost"] for row in rows) == units_of("22")
    with lite.database.read() as session:
        assert sum(session.scalars(select(Invoice.total_minor))) == 2200


def test_a_correction_of_the_month_before_a_year_leaves_the_years_commitment(
    lite: Deployment,
) -> None:
    wrong = lite.price({"output": "10"}, model="slip")
    use(lite, JANUARY.replace(day=10), wrong.id, 30)
    plan(lite, "year", interval="year", minimum_commitment=units_of("100"))
    with lite.database.transaction() as session:
        subscriptions.subscribe(session, "acme", "year", FEBRUARY)
    assert final(lite, 2) == {"usage": "30.00"}
    use(lite, FEBRUARY.replace(day=10), wrong.id, 20)
    assert final(lite, 3) == {"usage": "20.00"}
    lite.clock.set(datetime(2027, 1, 10, tzinfo=UTC))
    right = lite.price({"output": "5"}, model="slip")
    with lite.database.transaction() as session:
        for start, end in ((JANUARY, FEBRUARY), (FEBRUARY, FEBRUARY.replace(month=3))):
            rerating.post_all(session, lite.clock, rerating.Request(wrong.id, right.id, start, end))
    # 15.00 of January return, which are not the year's; 10.00 of its first month do: 10.00 are drawn.
    assert final(lite, 2, 2027) == {"adjustment": "-25.00", "commitment": "90.00"}
