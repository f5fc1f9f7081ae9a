"""What pages say is so: units of prices, counts of one, sums of the trial balance, what to do next."""

import re
from datetime import timedelta
from html import unescape

import httpx
import pytest

from billing.accounts.accounts import ensure_account
from billing.ledger import credits
from billing.pricing.pricing import PER_MILLION, Component
from core.money import Money
from core.tenants import keys, organisations
from core.tenants.models import ApiKey
from core.tenants.scope import scope_of_operator
from dashboards import charts
from dashboards.formats import counted
from dashboards.pages.operator.margin import _hours
from dashboards.pages.operator.traffic import speed_tiles
from dashboards.traffic import total
from tests.gateway.deployment import Deployment


def _text(page: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


def test_a_price_is_asked_for_in_the_unit_that_it_is_stored_in(operator: httpx.Client) -> None:
    page = operator.get("/dashboard/operator/prices").text
    labels = {
        name: words
        for words, name in re.findall(
            r'<label><span>([^<]+?)\s*(?:<small>.*?</small>)?</span>\s*<input name="(\w+)" type="number"',
            page,
        )
    }
    assert set(labels) == {each.value for each in Component} - {"waived"}
    for name, words in labels.items():
        assert (Component(name) in PER_MILLION) == ("million" in words), f"{name}: {words}"


def test_the_trial_balance_has_every_digit_and_a_sum_of_each_currency(
    deployment: Deployment, operator: httpx.Client
) -> None:
    services = deployment.services
    with services.database.transaction() as session:
        now = services.clock.now()
        ensure_account(session, deployment.tenant_id, now)
        credits.grant(
            session,
            tenant_id=deployment.tenant_id,
            kind="prepaid",
            money=Money(1_234_567_890_123, "USD"),
            reference="wire",
            at=now,
        )
    page = operator.get("/dashboard/operator/ledger").text
    table = page.partition("Trial balance")[2].partition("</table>")[0]
    rows = [_text(row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    assert any("1.234567890123 USD" in row and "cash" in row for row in rows), rows
    sums = [row for row in rows if row.strip().startswith("Total")]
    assert len(sums) == 1
    debit, credit, balance = re.findall(r"([\d.]+) USD", sums[0].replace("\u202f", ""))
    assert debit == credit != "0.00" and balance == "0.00"


def test_an_account_without_a_match_leads_back_to_all(operator: httpx.Client) -> None:
    for path in (
        "ledger?q=nothing-has-this",
        "invoices?q=nothing-has-this",
        "payments?state=failed",
    ):
        page = operator.get(f"/dashboard/operator/{path}").text
        own = f'href="/dashboard/operator/{path.partition("?")[0]}">Show all<'
        assert own in page, path


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests")]
)
def test_one_is_no_plural(count: int, said: str) -> None:
    assert counted(count, "request") == said


def test_where_no_audit_has_run_the_page_says_it_once_and_health_leads_to_it(
    operator: httpx.Client,
) -> None:
    page = operator.get("/dashboard/operator/reconciliation").text
    assert _text(page).count("No audit has run yet") == 1 and 'class="empty"' not in page
    assert ">Audit now</button>" in page
    health = operator.get("/dashboard/operator/health").text
    assert "the button runs it now" not in health
    assert health.count('href="/dashboard/operator/reconciliation"') >= 3


def test_a_month_that_cannot_be_signed_says_why(operator: httpx.Client) -> None:
    page = operator.get("/dashboard/operator/month-end").text
    assert "It can be signed when no check is bad." in page


def test_a_column_without_acts_is_not_shown(deployment: Deployment, owner: httpx.Client) -> None:
    page = owner.get("/dashboard/limits").text
    limits = page.partition("Limits in force")[2].partition("</table>")[0]
    assert "the plan" in limits and "Change" not in limits


def test_keys_of_ended_playground_pages_are_not_listed(
    deployment: Deployment, owner: httpx.Client
) -> None:
    services, names = deployment.services, ("playground page", "made by a person")
    made: dict[str, str] = {}
    with services.database.transaction() as session:
        scope = scope_of_operator(deployment.tenant_id)
        project = organisations.projects(session, scope)[0]
        for name in names:
            made[name] = keys.issue(
                session,
                scope,
                services.clock,
                project_id=project.id,
                name=name,
                expires_at=services.clock.now() + timedelta(hours=1),
            ).id
    listed = owner.get("/dashboard/keys").text
    assert all(name in listed for name in names)
    with services.database.transaction() as session:
        for key_id in made.values():
            key = session.get_one(ApiKey, key_id)
            assert key.expires_at is not None
            key.created_at -= timedelta(hours=2)
            key.expires_at -= timedelta(hours=2)
    listed = owner.get("/dashboard/keys").text
    assert names[0] not in listed and names[1] in listed


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(60, "0.017"), (216, "0.06"), (5400, "1.5"), (86_400, "24"), (9e6, "2,500")],
)
def test_hours_of_a_young_installation_are_not_nothing(seconds: float, said: str) -> None:
    assert _hours(int(seconds)) == said


def test_without_streams_the_first_token_says_so() -> None:
    tile = speed_tiles(total([]), timedelta(hours=1))[0]
    assert (tile.value, tile.note) == ("–", "no streams")


def test_a_single_bar_is_not_as_wide_as_the_chart() -> None:
    drawn = charts.stacked_bars("One", ["a"], [charts.Series("x", [3])])
    widths = [float(each) for each in re.findall(r'<rect class="s0" [^>]*?width="([\d.]+)"', drawn)]
    assert widths and max(widths) < charts.WIDTH / 8
