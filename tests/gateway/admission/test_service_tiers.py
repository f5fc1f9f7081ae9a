"""`service_tier` on the built-in engine: offered by a price, which it is charged at."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from sqlalchemy import select

from billing.accounts.tables import BillingPeriod
from billing.invoicing import invoices
from billing.pricing.prices import PriceDraft, save
from billing.pricing.tables import PriceVersionRow
from billing.rating.rating_worker import rate_all
from core.clock import SystemClock
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.serving.test_batches import line, start, wait

ASK: Any = [{"role": "user", "content": "What is a toll?"}]


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A gateway with prices for both tiers, and one of cached answers."""
    with running_deployment(tmp_path_factory.mktemp("tiers")) as made:
        with made.services.database.transaction() as session:
            for suffix, terms in (
                ("priority", {"output": "6", "input": "1"}),
                ("flex", {"output": "0.1"}),
                ("cache", {"request": "0.002"}),
            ):
                draft = PriceDraft(f"{MODEL}@{suffix}", terms, SystemClock().now())
                save(session, SystemClock(), draft)
        made.services.prices.refresh()
        yield made


@pytest.fixture(scope="module")
def sdk(offered: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{offered.url}/v1", api_key=offered.key, max_retries=0) as made:
        yield made


def priced_by(deployment: Deployment, request_id: str) -> str:
    event = deployment.event(request_id)
    with deployment.services.database.read() as session:
        return session.get_one(PriceVersionRow, event["price_version"]).model


@pytest.mark.parametrize(
    ("tier", "priority", "model"),
    [
        ("priority", 10, f"{MODEL}@priority"),
        ("flex", -1, f"{MODEL}@flex"),
        ("auto", 1, MODEL),
        ("default", 1, MODEL),
    ],
)
def test_a_tier_has_its_place_and_its_price(
    offered: Deployment, sdk: OpenAI, tier: Any, priority: int, model: str
) -> None:
    shown = tier if tier != "auto" else "default"
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_tokens=3, service_tier=tier
    )
    assert raw.parse().service_tier == shown
    assert offered.engine.submitted[-1].priority == priority
    assert priced_by(offered, raw.headers["x-request-id"]) == model
    raw = sdk.responses.with_raw_response.create(
        model=MODEL, input="Hi", max_output_tokens=3, service_tier=tier
    )
    assert raw.parse().service_tier == shown
    assert offered.engine.submitted[-1].priority == priority
    assert priced_by(offered, raw.headers["x-request-id"]) == model


def test_a_stream_says_its_tier(sdk: OpenAI) -> None:
    chunks = sdk.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=3, service_tier="priority", stream=True
    )
    assert {each.service_tier for each in chunks} == {"priority"}


@pytest.mark.parametrize("tier", ["cache", "scale", "PRIORITY", ""])
def test_what_is_no_tier_is_refused_by_name(sdk: OpenAI, tier: Any) -> None:
    """Among them the suffix of another price."""
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=3, service_tier=tier)
    assert (caught.value.param, caught.value.code) == ("service_tier", "unsupported_parameter")


def test_an_invoice_names_the_tier(offered: Deployment, sdk: OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_tokens=3, service_tier="priority"
    )
    offered.event(raw.headers["x-request-id"])
    services = offered.services
    rate_all(services.database, services.clock)
    with services.database.transaction() as session:
        (period,) = session.scalars(select(BillingPeriod))
        invoice = invoices.draft(session, services.clock, period.id)
        assert invoice is not None
        texts = [each.description for each in invoices.lines_of(session, invoice.id)]
    assert any(each.startswith(MODEL) and each.endswith(", priority tier") for each in texts), texts


def test_a_line_of_a_batch_has_no_tier(offered: Deployment, sdk: OpenAI) -> None:
    made = start(sdk, line("a", service_tier="priority"))
    wait(sdk, made.id)
    refused = sdk.files.content(sdk.batches.retrieve(made.id).error_file_id or "").json()
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "service_tier"
