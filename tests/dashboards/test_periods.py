"""Periods of Usage, Requests and Costs: presets, a first and a last day, and the period before; against
figures computed by hand."""

import re
from collections.abc import Iterator
from datetime import date, timedelta
from html import unescape

import httpx
import pytest

from billing.pricing.prices import ensure_default_prices
from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups, usage
from core.tenants.organisations import create_project
from core.tenants.scope import scope_of_operator
from tests.dashboards.usage_events import usage_event
from tests.gateway.deployment import MODEL, Deployment, running_deployment

# Days ago -> (served, refused, failed); each served one has 1000 input and 10 output tokens.
DAYS = {1: (3, 1, 0), 2: (3, 0, 2), 8: (4, 0, 1), 20: (1, 0, 0)}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("periods")) as made:
        _fill(made)
        yield made


def _fill(made: Deployment) -> None:
    services = made.services
    now = services.clock.now().replace(hour=0, minute=0, second=1, microsecond=0)
    with services.database.transaction() as session:
        price = ensure_default_prices(session, services.clock, MODEL).id
        scope = scope_of_operator(made.tenant_id)
        project = create_project(session, scope, services.clock, name="periods").id
        events = []
        for ago, counts in DAYS.items():
            for status, count in zip((200, 404, 503), counts, strict=True):
                served = status == 200
                events += [
                    usage_event(
                        now - timedelta(days=ago),
                        price,
                        tenant_id=made.tenant_id,
                        project_id=project,
                        status=status,
                        input_tokens=1_000 if served else 0,
                        output_tokens=10 if served else 0,
                        finish_reason="stop" if served else "error",
                        end_user="ann",
                    )
                    for _ in range(count)
                ]
        usage.record(session, events, services.clock)
    rate_all(services.database, services.clock)
    service_rollups.sum_all(services.database, services.clock)


def tile(page: str, title: str) -> str:
    """The words of a tile, without marks."""
    found = re.search(rf"<dt>(?:<abbr[^>]*>)?{title}(?:</abbr>)?</dt><dd.*?</dd>", page)
    assert found is not None, title
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", found[0])).split())


def test_requests_are_compared_with_the_period_before(owner: httpx.Client) -> None:
    plain = owner.get("/dashboard/requests?q=since:7d").text
    assert "Compare with the period before" in plain and "before</small>" not in plain
    page = owner.get("/dashboard/requests?q=since:7d&compare=1").text
    assert tile(page, "Requests") == "Requests 9 +80.0 % against 5 before"
    assert tile(page, "Rejected") == "Rejected 1 0 before"
    assert tile(page, "Server errors") == "Server errors 2 +100.0 % against 1 before"
    assert tile(page, "Input tokens") == "Input tokens 6 000 +50.0 % against 4 000 before"
    assert tile(page, "Output tokens") == "Output tokens 60 +50.0 % against 40 before"
    assert "+50.0 % against" in tile(page, "Charges")


def test_what_only_single_requests_know_is_compared_too(owner: httpx.Client) -> None:
    page = owner.get("/dashboard/requests?q=status:5xx+since:7d&compare=1").text
    assert tile(page, "Requests") == "Requests 2 +100.0 % against 1 before"
    page = owner.get("/dashboard/requests?q=user:ann+cost>0+since:7d&compare=1").text
    assert tile(page, "Requests") == "Requests 6 +50.0 % against 4 before"
    long = owner.get("/dashboard/requests?q=user:ann+since:30d&compare=1")
    assert long.status_code == 200 and "The periods are not compared." in long.text
    assert long.text.count("<tr>") == 16, "all are listed below a head"


@pytest.mark.parametrize("path", ["usage", "requests"])
def test_a_first_and_a_last_day_become_part_of_the_query(
    owner: httpx.Client, deployment: Deployment, path: str
) -> None:
    today = deployment.services.clock.now().date()
    first, last = today - timedelta(days=2), today - timedelta(days=2)
    page = owner.get(f"/dashboard/{path}", params={"q": f"model:{MODEL} since:7d"}).text
    form = re.search(r'<details class="custom">.*?</details>', page, re.DOTALL)
    assert form is not None
    assert f'name="q" value="model:{MODEL}"' in form[0], "the query is kept without its days"
    assert f'name="from" value="{today - timedelta(days=6)}"' in form[0]
    asked = {"q": f"model:{MODEL}", "from": str(first), "to": str(last)}
    page = owner.get(f"/dashboard/{path}", params=asked).text
    assert f'value="model:{MODEL} since:{first} until:{last}"' in page
    assert 'class="on"' in page
    assert tile(page, "Requests").split()[1] == "3" if path == "usage" else page.count("<tr>") == 6


def test_days_in_the_wrong_order_are_refused_beside_the_query(owner: httpx.Client) -> None:
    asked = {"q": "", "from": "2026-05-02", "to": "2026-05-01"}
    answer = owner.get("/dashboard/usage", params=asked)
    assert answer.status_code == 400 and "after its end on 2026-05-01" in answer.text


def test_costs_have_the_same_periods(owner: httpx.Client, deployment: Deployment) -> None:
    today = deployment.services.clock.now().date()
    week = today - timedelta(days=6)
    page = unescape(owner.get("/dashboard/costs?by=key_id").text)
    assert f'href="?from={week}&to={today}&by=key_id">7 days</a>' in page
    page = owner.get(f"/dashboard/costs?from={week}&to={today}&by=key_id&compare=1").text
    assert "+50.0 % against" in tile(page, "Spend")
    assert re.search(r'aria-current="true">7 days', page)
    assert 'name="by" value="key_id"' in page and 'name="compare" value="1"' in page
    old = date(today.year, today.month, 1) - timedelta(days=40)
    own = owner.get(f"/dashboard/costs?from={old}&to={old}").text
    assert f"{old:%d %b %Y} to {old:%d %b %Y}" in own


def test_the_pointer_shows_a_value_with_its_unit(
    owner: httpx.Client, deployment: Deployment
) -> None:
    page = owner.get("/dashboard/usage?q=since:7d").text
    assert re.search(r"<title>\d\d \w{3}, output: 30 tokens</title>", page)
    assert re.search(r"<title>\d\d \w{3}, tiny: 3 requests</title>", page)
    spent = owner.get("/dashboard/costs?from=2000-01-01&to=2000-01-02").text
    assert "<rect class" not in spent.split("<main")[1]
    today = deployment.services.clock.now().date()
    costs = owner.get(f"/dashboard/costs?from={today - timedelta(days=6)}&to={today}").text
    assert re.search(r"<title>\d\d \w{3}, Input: [0-9.]+ USD</title>", costs)
