"""An account's entries with the balance after each, by figures worked out by hand."""

from datetime import timedelta

import pytest

from billing.ledger import account_statement, credits, journal
from billing.ledger.account_statement import StatementQuery
from core.errors import BadRequest, NotFound, TollhouseError
from core.money import Money, units_of
from tests.billing.conftest import START, Deployment

DAY = timedelta(days=1)


def grant(made: Deployment, tenant: str, amount: str, reference: str) -> None:
    with made.database.transaction() as session:
        credits.grant(
            session,
            tenant_id=tenant,
            kind="prepaid",
            money=Money(units_of(amount), "USD"),
            reference=reference,
            at=made.clock.now(),
        )


@pytest.fixture
def paid(deployment: Deployment) -> Deployment:
    """Cash of 10, 20 and 0.5 of `acme` on days 0, 1 and 2, and 100 of `other` on day 1."""
    deployment.tenant("other")
    grant(deployment, "acme", "10", "first")
    deployment.clock.advance(days=1)
    grant(deployment, "acme", "20", "second")
    grant(deployment, "other", "100", "third")
    deployment.clock.advance(days=1)
    grant(deployment, "acme", "0.5", "fourth")
    return deployment


def balances(made: Deployment, query: StatementQuery, **options: int) -> list[str]:
    """Opening, after each entry, closing."""
    with made.database.read() as session:
        found = account_statement.read(session, account_statement.check(query), **options)
    lines = [line["balance"]["amount"] for line in found["data"]]
    return [found["opening"]["amount"], *lines, found["closing"]["amount"]]


def test_the_balance_runs_from_what_was_before(paid: Deployment) -> None:
    assert balances(paid, StatementQuery("cash", tenant_id="acme")) == [
        "0", "10", "30", "30.5", "30.5",
    ]  # fmt: skip
    assert balances(paid, StatementQuery("prepaid", tenant_id="acme"))[-1] == "-30.5"
    since = StatementQuery("cash", tenant_id="acme", start=START + DAY)
    assert balances(paid, since) == ["10", "30", "30.5", "30.5"]
    until = StatementQuery("cash", tenant_id="acme", start=START + DAY, end=START + 2 * DAY)
    assert balances(paid, until) == ["10", "30", "30"]
    assert balances(paid, StatementQuery("cash", "EUR")) == ["0", "0"]


def test_all_tenants_together_end_at_the_trial_balance(paid: Deployment) -> None:
    whole = balances(paid, StatementQuery("cash"))
    assert whole == ["0", "10", "30", "130", "130.5", "130.5"]
    with paid.database.read() as session:
        cash = next(row for row in journal.trial_balance(session) if row["account"] == "cash")
    assert cash["balance"]["amount"] == whole[-1]


def test_pages_follow_each_other_without_a_gap(paid: Deployment) -> None:
    query, after, seen = StatementQuery("cash"), 0, list[str]()
    with paid.database.read() as session:
        while after is not None:
            found = account_statement.read(session, query, after=after, limit=1)
            assert found["opening"]["amount"] == (seen[-1] if seen else "0")
            seen += [line["balance"]["amount"] for line in found["data"]]
            after = found["next"]
        assert account_statement.read(session, query, limit=len(seen))["next"] is None, "no more"
        lines = list(account_statement.all_lines(session, query))
    assert seen == ["10", "30", "130", "130.5"]
    assert [line["balance"]["amount"] for line in lines] == seen
    assert lines[2]["tenant"] == "other" and lines[2]["debit"]["amount"] == "100"


@pytest.mark.parametrize(
    ("query", "error", "named"),
    [
        (StatementQuery("petty"), NotFound, "petty"),
        (StatementQuery("cash", "ABC"), BadRequest, "ABC"),
        (StatementQuery("cash", start=START, end=START), BadRequest, "before"),
        (StatementQuery("cash", start=START.replace(tzinfo=None)), BadRequest, "time zone"),
    ],
)
def test_a_wrong_query_is_refused(
    query: StatementQuery, error: type[TollhouseError], named: str
) -> None:
    with pytest.raises(error, match=named):
        account_statement.check(query)


def test_an_unknown_place_is_refused(paid: Deployment) -> None:
    with pytest.raises(BadRequest, match="no entry"):
        balances(paid, StatementQuery("cash"), after=10**9)
