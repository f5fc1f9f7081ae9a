"""Organisations above organisations: who pays, mark-ups, roll-ups, by figures worked out by hand.

A child has a fee of 100.00 a month, and 1,000,000 input and output tokens cost 0.15 and 0.60.
"""

from datetime import timedelta
from typing import Any

import pytest

from billing.accounts.tables import BillingAccount
from billing.adjustments import organisation_links
from billing.adjustments.organisation_links import LinkDraft
from billing.invoicing import invoice_run, invoices
from billing.invoicing.tables import Invoice
from billing.invoicing.views import invoice_json
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind
from billing.organisations import organisation_usage
from billing.payments import settlement
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from billing.taxes import tax_rates
from core.errors import BadRequest, Conflict, NotFound, TollhouseError
from core.money import Money, units_of
from tests.billing.conftest import START, Deployment
from tests.billing.invoicing.test_invoices import clean


def plan(made: Deployment, name: str, fee: str, **fields: Any) -> None:
    with made.database.transaction() as session:
        base = {"id": name, "name": name, "currency": "USD", "created_at": made.clock.now()}
        session.add(Plan(**{**base, "base_fee": units_of(fee), **fields}))


def subscribe(made: Deployment, tenant: str, name: str) -> None:
    with made.database.transaction() as session:
        subscriptions.subscribe(session, tenant, name, made.clock.now(), 0)


def link(
    made: Deployment, child: str, parent: str, pays: str = "parent", markup: str = "0"
) -> None:
    with made.database.transaction() as session:
        draft = LinkDraft(child, parent, pays, markup, "operator")
        organisation_links.set_parent(session, made.clock, draft)


def use(made: Deployment, tenant: str, **fields: Any) -> None:
    tokens = {"input_tokens": 10**6, "cached_tokens": 0, "output_tokens": 10**6, "waived_tokens": 0}
    made.record(made.event(**{"tenant_id": tenant, **tokens, **fields}))


def run(made: Deployment, **options: Any) -> None:
    result = invoice_run.run(made.database, made.clock, current=False, **options)
    assert not result.failed


def shown(made: Deployment, tenant: str) -> list[dict[str, Any]]:
    with made.database.read() as session:
        rows = session.query(Invoice).filter_by(tenant_id=tenant).order_by(Invoice.period_start)
        return [invoice_json(session, each) for each in rows]


def lines(invoice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(line["kind"], line["billed"]["text"]) for line in invoice["lines"]]


def paid_by_child(made: Deployment) -> None:
    """Its invoice, before its parent's is made."""
    run(made, tenant_ids=["lab"])
    with made.database.transaction() as session:
        (invoice,) = session.query(Invoice).filter_by(tenant_id="lab")
        payment = settlement.begin_payment(
            session,
            tenant_id="lab",
            invoice_id=invoice.id,
            amount_minor=invoice.due_minor,
            currency="USD",
            provider="manual",
            reference="transfer",
            at=made.clock.now(),
        )
        settlement.succeed(session, payment, made.clock.now())


@pytest.fixture
def pair(deployment: Deployment) -> Deployment:
    return pair_of(deployment)


def pair_of(deployment: Deployment) -> Deployment:
    """`lab` with its fee and usage, and `holding`, whose name sorts before it."""
    plan(deployment, "fees", "100")
    for name in ("holding", "lab"):
        deployment.tenant(name)
    subscribe(deployment, "lab", "fees")
    use(deployment, "lab")
    return deployment


def test_a_parent_that_pays_has_its_child_s_charges_taxed_on_its_own_invoice(
    pair: Deployment,
) -> None:
    with pair.database.transaction() as session:
        tax_rates.add_rate(session, "DE", "VAT", 190_000, START)
        for name in ("holding", "lab"):
            session.get_one(BillingAccount, name).tax_region = "DE"
    link(pair, "lab", "holding", "parent", "12.5")
    pair.clock.advance(days=40)
    run(pair)
    (child,), (parent,) = shown(pair, "lab"), shown(pair, "holding")
    # 12.5 % of 100.75 is 12.59375.
    assert lines(child) == [
        ("usage", "0.15"),
        ("usage", "0.60"),
        ("base_fee", "100.00"),
        ("markup", "12.59"),
        ("transfer", "-113.34"),
    ]
    assert child["lines"][3]["exact"]["amount"] == "12.59375"
    assert (child["total"]["text"], child["due"]["text"], child["status"]) == (
        "0.00",
        "0.00",
        "paid",
    )
    # The mark-up is the parent's own business: 19 % of 100.75 is 19.1425.
    assert lines(parent) == [("child", "100.75"), ("tax", "19.14")]
    assert parent["lines"][0]["description"] == "lab, charges of 2026-01-01 to 2026-02-01"
    assert parent["due"]["text"] == "119.89"
    with pair.database.read() as session:
        owed = {
            name: -ledger.balance(session, name, AccountKind.REVENUE, "USD")
            for name in ("holding", "lab")
        }
    assert owed["holding"] == units_of("100.75")
    # What stays with the child is the part of a cent by which the mark-up was rounded.
    assert owed["lab"] == units_of("0.00375")
    clean(pair)
    run(pair)
    assert [each["number"] for each in shown(pair, "holding")] == [parent["number"]]


def test_a_child_that_pays_itself_pays_the_mark_up_and_the_parent_earns_it(
    pair: Deployment,
) -> None:
    plan(pair, "small", "50")
    subscribe(pair, "holding", "small")
    link(pair, "lab", "holding", "self", "12.5")
    pair.clock.advance(days=40)
    paid_by_child(pair)
    run(pair)
    (child,), (parent,) = shown(pair, "lab"), shown(pair, "holding")
    assert lines(child)[-1] == ("markup", "12.59") and child["due"]["text"] == "113.34"
    assert lines(parent) == [("base_fee", "50.00"), ("child_markup", "-12.59")]
    assert parent["due"]["text"] == "37.41"
    clean(pair)


def test_an_earned_mark_up_beyond_the_parent_s_invoice_is_its_credit(pair: Deployment) -> None:
    link(pair, "lab", "holding", "self", "12.5")
    pair.clock.advance(days=40)
    paid_by_child(pair)
    run(pair)
    (parent,) = shown(pair, "holding")
    assert (lines(parent), parent["due"]["text"]) == ([("child_markup", "-12.59")], "0.00")
    with pair.database.read() as session:
        assert settlement.wallet(session, "holding", "USD") == units_of("12.59")
    clean(pair)


def test_charges_pass_through_every_level_in_one_run(pair: Deployment) -> None:
    pair.tenant("division")
    plan(pair, "small", "50")
    subscribe(pair, "division", "small")
    link(pair, "lab", "division")
    link(pair, "division", "holding", "parent", "10")
    pair.clock.advance(days=40)
    run(pair)
    (middle,), (top,) = shown(pair, "division"), shown(pair, "holding")
    assert lines(middle) == [
        ("base_fee", "50.00"),
        ("child", "100.75"),
        ("markup", "15.08"),  # 10 % of 150.75 is 15.075
        ("transfer", "-165.83"),
    ]
    assert lines(top) == [("child", "150.75")]
    clean(pair)


def test_a_parent_waits_for_a_child_with_a_longer_grace_period(pair: Deployment) -> None:
    plan(pair, "slow", "100", grace_hours=240)
    pair.tenant("late")
    subscribe(pair, "late", "slow")
    link(pair, "lab", "holding")
    link(pair, "late", "holding")
    pair.clock.advance(days=35)
    run(pair)
    (parent,) = shown(pair, "holding")
    assert (parent["status"], lines(parent)) == (
        "draft",
        [("child", "100.75"), ("child", "100.00")],
    )
    with pair.database.read() as session, pytest.raises(Conflict, match="child organisations"):
        period = session.get_one(Invoice, parent["id"]).period_id
        with pair.database.transaction() as writing:
            invoices.finalise(writing, pair.clock, period)
    pair.clock.advance(days=8)
    run(pair)
    assert shown(pair, "holding")[0]["status"] == "final"
    clean(pair)


def test_late_usage_of_a_child_is_on_the_parent_s_next_invoice_once(pair: Deployment) -> None:
    link(pair, "lab", "holding")
    pair.clock.advance(days=40)
    run(pair)
    use(pair, "lab", occurred_at=START + timedelta(days=3))
    pair.rate()
    pair.clock.advance(days=30)
    run(pair)
    first, second = shown(pair, "holding")
    assert lines(first) == [("child", "100.75")]
    assert lines(second) == [("child", "100.75")]  # February's fee, and 0.75 of January
    assert ("late_usage", "0.60") in lines(shown(pair, "lab")[1])
    clean(pair)


def test_a_child_s_own_credit_pays_first(pair: Deployment) -> None:
    with pair.database.transaction() as session:
        for kind, amount in (("promo", "20"), ("prepaid", "30")):
            credits.grant(
                session,
                tenant_id="lab",
                kind=kind,
                money=Money(units_of(amount), "USD"),
                reference=kind,
                at=pair.clock.now(),
            )
    link(pair, "lab", "holding")
    pair.clock.advance(days=40)
    run(pair)
    assert lines(shown(pair, "holding")[0]) == [("child", "50.75")]
    (child,) = shown(pair, "lab")
    assert (lines(child)[-1], child["due"]["text"]) == (("transfer", "-50.75"), "0.00")
    clean(pair)


def test_a_child_s_invoice_can_be_void_until_its_parent_s_has_it(pair: Deployment) -> None:
    link(pair, "lab", "holding")
    pair.clock.advance(days=40)
    run(pair, tenant_ids=["lab"])
    (child,) = shown(pair, "lab")
    with pair.database.transaction() as session:
        settlement.void(session, child["id"], pair.clock.now(), "wrong")
    run(pair)
    assert shown(pair, "holding") == []
    clean(pair)
    use(pair, "lab")
    pair.clock.advance(days=30)
    run(pair)
    second = shown(pair, "lab")[1]
    with (
        pytest.raises(Conflict, match="parent organisation"),
        pair.database.transaction() as session,
    ):
        settlement.void(session, second["id"], pair.clock.now(), "wrong")


def test_a_link_that_ends_passes_nothing_on_any_more(pair: Deployment) -> None:
    link(pair, "lab", "holding")
    pair.clock.advance(days=31)
    run(pair)
    assert shown(pair, "holding")[0]["status"] == "draft"
    with pair.database.transaction() as session:
        organisation_links.remove_parent(session, "lab")
    pair.clock.advance(days=9)
    run(pair)
    assert shown(pair, "lab")[0]["due"]["text"] == "100.75"
    assert [each["due"]["text"] for each in shown(pair, "holding")] in ([], ["0.00"])
    clean(pair)


def test_the_roll_up_has_all_below_from_the_day_of_their_link(pair: Deployment) -> None:
    pair.tenant("team")
    pair.clock.advance(days=2)
    link(pair, "lab", "holding", "parent", "12.5")
    link(pair, "team", "lab", "self")
    use(pair, "lab")
    use(pair, "team", model="demo")
    use(pair, "acme")
    pair.rate()
    with pair.database.read() as session:
        rows = organisation_usage.rollup(session, "holding", START, START + timedelta(days=9))
        below_lab = organisation_usage.rollup(session, "lab", START, START + timedelta(days=9))
        by_model = organisation_usage.rollup(
            session, "holding", START, START + timedelta(days=9), by_model=True
        )
        assert (
            organisation_usage.rollup(session, "team", START, START + timedelta(days=9))[0][
                "tenant"
            ]
            == "team"
        )
    found = [(row["tenant"], row["level"], row["requests"], row["amount"]) for row in rows]
    # The lab's first usage was before it came below the holding.
    assert found == [
        ("lab", 1, 1, units_of("0.75")),
        ("team", 2, 1, units_of("0.75")),
    ]
    assert rows[0]["markup"] == units_of("0.09375") and rows[1]["markup"] == 0
    assert [(row["tenant"], row["requests"]) for row in below_lab] == [("lab", 2), ("team", 1)]
    assert {row["model"] for row in by_model} == {"demo"}


@pytest.mark.parametrize(
    ("child", "parent", "fields", "error", "named"),
    [
        ("acme", "acme", {}, Conflict, "below itself"),
        ("holding", "lab", {}, Conflict, "below itself"),
        ("holding", "team", {}, Conflict, "below itself"),
        ("acme", "holding", {"pays": "nobody"}, BadRequest, "pays"),
        ("acme", "holding", {"markup": "-1"}, BadRequest, "mark-up"),
        ("acme", "holding", {"markup": "1000.1"}, BadRequest, "mark-up"),
        ("acme", "holding", {"markup": "0.00001"}, BadRequest, "mark-up"),
        ("acme", "holding", {"markup": "lots"}, BadRequest, "mark-up"),
        ("euro", "holding", {"pays": "parent"}, Conflict, "EUR"),
        ("euro", "holding", {"pays": "self", "markup": "1"}, Conflict, "EUR"),
    ],
)
def test_a_wrong_link_is_refused(
    lite: Deployment,
    child: str,
    parent: str,
    fields: dict[str, str],
    error: type[TollhouseError],
    named: str,
) -> None:
    for name in ("holding", "lab", "team"):
        lite.tenant(name)
    lite.tenant("euro", currency="EUR")
    link(lite, "lab", "holding")
    link(lite, "team", "lab")
    with pytest.raises(error, match=named):
        link(lite, child, parent, **fields)
    link(lite, "euro", "holding", "self")


def test_there_is_an_end_to_the_levels(lite: Deployment) -> None:
    for number in range(9):
        lite.tenant(f"level-{number}")
    for number in range(7):
        link(lite, f"level-{number + 1}", f"level-{number}")
    with pytest.raises(Conflict, match="8 levels"):
        link(lite, "level-8", "level-7")
    with pytest.raises(Conflict, match="8 levels"):
        link(lite, "level-0", "level-8")
    with pytest.raises(NotFound, match="no parent"), lite.database.transaction() as session:
        organisation_links.remove_parent(session, "level-0")
