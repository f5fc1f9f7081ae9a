"""Limits and money as clients meet them: the real SDK, parallel bursts, a budget that ends mid-answer."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI, RateLimitError

from billing.notices import budgets
from billing.pricing.prices import PriceDraft, load_price_book
from billing.pricing.pricing import Counts, PriceBook
from billing.rating.price_changes import save as save_price
from billing.rating.rating_worker import rate_all
from core.clock import SystemClock
from core.money import Money
from core.tenants import keys, limits
from core.tenants.organisations import create_project, create_tenant
from core.tenants.plans import DAY, LimitRule, Scope, Unit
from core.tenants.scope import TenantScope, scope_of_operator
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CHAT = "/v1/chat/completions"
CLOCK = SystemClock()
Served = tuple[Deployment, httpx.Client]


def book_of(deployment: Deployment) -> PriceBook:
    with deployment.services.database.read() as session:
        return load_price_book(session)


class Firm:
    """A tenant of one test, so that no test meets another's limits."""

    def __init__(self, served: Served, name: str, *rules: LimitRule, currency: str = "USD") -> None:
        self.deployment, self.client = deployment, _ = served
        self.book = book_of(deployment)
        with deployment.services.database.transaction() as session:
            tenant = create_tenant(session, CLOCK, name=name, currency=currency)
            self.scope: TenantScope = scope_of_operator(tenant.id)
            self.project = create_project(session, self.scope, CLOCK, name="default").id
            for rule in rules:
                limits.set_rule(session, self.scope, CLOCK, rule)
            self.key = keys.issue(
                session, self.scope, CLOCK, project_id=self.project, name="k"
            ).secret

    def ask(self, **fields: object) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]} | fields
        headers = {"authorization": f"Bearer {self.key}"}
        return self.client.post(CHAT, json=body, headers=headers)

    def budget(self, units: int) -> None:
        with self.deployment.services.database.transaction() as session:
            budgets.create(
                session,
                CLOCK,
                tenant_id=self.scope.tenant_id,
                scope="tenant",
                scope_id=self.scope.tenant_id,
                cap=Money(units),
            )
        self.deployment.services.prices.refresh()

    def spent(self, count: int) -> int:
        """What the ended requests cost, by the price that was pinned to each."""
        rows = []
        deadline = time.monotonic() + 60
        while len(rows) < count and time.monotonic() < deadline:
            everything = self.deployment.events(0)
            rows = [row for row in everything if row["tenant_id"] == self.scope.tenant_id]
            time.sleep(0.02)
        assert len(rows) == count
        return sum(
            self.book.by_id[row["price_version"]].cost(
                Counts.of_answer(
                    row["input_tokens"],
                    row["cached_tokens"],
                    row["output_tokens"],
                    row["waived_tokens"],
                    adapter=False,
                    status=row["status"],
                )
            )
            for row in rows
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with (
        running_deployment(tmp_path_factory.mktemp("limits")) as deployment,
        httpx.Client(base_url=deployment.url, timeout=30) as client,
    ):
        yield deployment, client


@pytest.fixture
def deployment(served: Served) -> Deployment:
    return served[0]


def test_a_burst_is_admitted_up_to_the_limit_exactly(
    served: Served, deployment: Deployment
) -> None:
    firm = Firm(served, "burst", LimitRule(Scope.TENANT, Unit.REQUESTS, 9, DAY))
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: firm.ask(max_tokens=2), range(40)))
    assert Counter(answer.status_code for answer in answers) == {200: 9, 429: 31}
    refused = next(answer for answer in answers if answer.status_code == 429)
    error, headers = refused.json()["error"], refused.headers
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "This organisation may send 9 requests a day." in error["message"]
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert int(headers["retry-after-ms"]) <= int(headers["retry-after"]) * 1000
    assert "q=9;w=86400" in headers["ratelimit-policy"]
    admitted = next(answer for answer in answers if answer.status_code == 200)
    assert "tenant-requests-86400" in admitted.headers["ratelimit"]
    assert admitted.headers["x-tollhouse-cached-token-weight"] == "0.1"


def test_the_sdk_that_obeys_the_header_gets_through_by_itself(
    served: Served, deployment: Deployment
) -> None:
    firm = Firm(served, "patient", LimitRule(Scope.KEY, Unit.REQUESTS, 60))
    for _ in range(60):
        assert firm.ask(max_tokens=1).status_code in (200, 429)
    messages = [{"role": "user", "content": "hello"}]
    hasty = OpenAI(base_url=f"{deployment.url}/v1", api_key=firm.key, max_retries=0)
    with hasty, pytest.raises(RateLimitError):
        for _ in range(20):
            hasty.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=firm.key, max_retries=2) as patient:
        answer = patient.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def test_tokens_are_counted_as_the_answer_says(served: Served, deployment: Deployment) -> None:
    limit = 100_000
    firm = Firm(served, "tokens", LimitRule(Scope.TENANT, Unit.TOTAL_TOKENS, limit, DAY))
    used = 0
    for _ in range(5):
        usage = firm.ask(max_tokens=7).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        used += usage["total_tokens"] - cached + -(-cached // 10)
    last = firm.ask(max_tokens=1)
    taken = last.json()["usage"]["prompt_tokens"] + 1
    remaining = int(last.headers["x-ratelimit-remaining-tokens"])
    # A day's bucket refills a little more than one token a second.
    assert 0 <= remaining - (limit - used - taken) <= 30


def test_one_request_at_a_time_means_one(served: Served, deployment: Deployment) -> None:
    firm = Firm(served, "single", LimitRule(Scope.KEY, Unit.CONCURRENT, 1))
    deployment.engine.token_delay_s = 0.05
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: firm.ask(max_tokens=8), range(6)))
    finally:
        deployment.engine.token_delay_s = 0.0
    counted = Counter(answer.status_code for answer in answers)
    assert counted[200] >= 1 and counted[429] >= 1 and set(counted) == {200, 429}
    assert firm.ask(max_tokens=1).status_code == 200  # the place came back


def test_a_budget_refuses_what_it_does_not_cover_and_is_never_passed(
    served: Served, deployment: Deployment
) -> None:
    firm = Firm(served, "thrifty")
    first = firm.ask(max_tokens=1)
    one = firm.spent(1)
    (price,) = firm.book.by_id.values()
    prompt = first.json()["usage"]["prompt_tokens"]
    token = price.upper_bound(prompt, 2, adapter=False) - price.upper_bound(
        prompt, 1, adapter=False
    )
    cap = one + price.upper_bound(prompt, 40, adapter=False)
    firm.budget(cap)
    _rate(deployment)
    long = firm.ask(max_tokens=300)
    assert long.status_code == 429, long.text
    assert "maximum of output tokens to 40" in long.json()["error"]["message"]
    assert firm.ask(max_tokens=40).json()["usage"]["completion_tokens"] == 40
    broke = firm.ask(max_tokens=5)
    assert broke.status_code in (402, 429), broke.text
    assert broke.json()["error"]["code"] == "insufficient_quota"
    assert broke.headers["x-should-retry"] == "false"
    total = firm.spent(2)
    assert cap - 2 * token <= total <= cap


def test_many_at_once_never_pass_the_budget_together(
    served: Served, deployment: Deployment
) -> None:
    firm = Firm(served, "crowd")
    firm.ask(max_tokens=1)
    one = firm.spent(1)
    cap = one * 12
    firm.budget(cap)
    _rate(deployment)
    with ThreadPoolExecutor(64) as pool:
        ways = [n % 2 == 1 for n in range(64)]
        answers = list(pool.map(lambda way: firm.ask(max_tokens=20, stream=way), ways))
    running_deployment = sum(answer.status_code == 200 for answer in answers)
    assert 0 < running_deployment < 64
    assert firm.spent(1 + running_deployment) <= cap


def _rate(deployment: Deployment) -> None:
    """Billing learns what was spent so far; the counters are seeded with it."""
    rate_all(deployment.services.database, CLOCK)
    deployment.services.prices.refresh()


def test_without_a_price_in_its_currency_a_tenant_is_refused_before_the_engine(
    served: Served, deployment: Deployment
) -> None:
    firm = Firm(served, "rhine", currency="EUR")
    before = len(deployment.engine.submitted)
    refused = firm.ask(max_tokens=2)
    assert refused.status_code == 404, refused.text
    assert refused.json()["error"]["code"] == "no_price"
    assert "EUR" in refused.json()["error"]["message"]
    assert len(deployment.engine.submitted) == before
    draft = PriceDraft(MODEL, {"input": "1", "output": "2"}, CLOCK.now(), currency="EUR")
    with deployment.services.database.transaction() as session:
        euros = save_price(session, CLOCK, draft)
    deployment.services.prices.refresh()
    assert firm.ask(max_tokens=2).status_code == 200
    assert deployment.last_event()["price_version"] == euros.id
    dollars = Firm(served, "potomac")
    assert dollars.ask(max_tokens=2).status_code == 200
    assert deployment.last_event()["price_version"] != euros.id


def test_a_budget_on_top_of_usage_that_is_not_rated_is_never_passed(
    served: Served, deployment: Deployment
) -> None:
    firm = Firm(served, "backlog")
    for _ in range(10):
        assert firm.ask(max_tokens=20).status_code == 200
    spent = firm.spent(10)  # stored, and nothing rates it
    cap = spent + spent // 20
    firm.budget(cap)
    answers = [firm.ask(max_tokens=20).status_code for _ in range(6)]
    assert 429 in answers or 402 in answers
    assert firm.spent(10 + answers.count(200)) <= cap
