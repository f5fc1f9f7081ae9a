"""Usage of embeddings, moderations, audio and images in OpenAI's shapes."""

import time
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest

from billing.pricing.prices import load_price_book
from billing.rating.rating_worker import rate_all
from billing.usage import usage
from core.events import UsageEvent, UsageKind
from core.ids import new_id
from core.tenants import organisations
from core.tenants.scope import scope_of_operator
from gateway.admin.finance.usage_kinds import ALL
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.openai_document import check

COUNTED = {
    UsageKind.EMBEDDING: ("input_tokens", 7),
    UsageKind.MODERATION: ("input_tokens", 0),
    UsageKind.SPEECH: ("characters", 40),
    UsageKind.AUDIO: ("seconds", 40),
    UsageKind.IMAGE: ("images", 40),
}


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("kinds")) as deployment:
        services = deployment.services
        now = services.clock.now()
        with services.database.transaction() as session:
            (project,) = organisations.projects(session, scope_of_operator(deployment.tenant_id))
            book = load_price_book(session)
            price = book.pin(deployment.tenant_id, MODEL, None, now, "USD").id
            usage.record(
                session,
                [
                    _event(deployment.tenant_id, project.id, price, kind, team)
                    for kind in COUNTED
                    for team in ("search", "ads")
                ],
                services.clock,
            )
        rate_all(services.database, services.clock)
        yield deployment


def _event(tenant_id: str, project_id: str, price: str, kind: UsageKind, team: str) -> UsageEvent:
    from core.clock import SystemClock

    at = SystemClock().now() - timedelta(seconds=5)
    name, count = COUNTED[kind]
    tokens = count if kind is UsageKind.EMBEDDING else 0
    return UsageEvent(
        request_id=new_id("req"),
        tenant_id=tenant_id,
        project_id=project_id,
        key_id="key",
        kind=kind,
        route="/v1/x",
        model=MODEL,
        adapter=None,
        adapter_digest=None,
        price_version=price,
        occurred_at=at,
        finished_at=at,
        input_tokens=tokens,
        cached_tokens=0,
        output_tokens=0,
        waived_tokens=0,
        finish_reason="stop",
        status=200,
        units=0 if name == "input_tokens" else count,
        labels=f"team={team}",
    )


@pytest.mark.parametrize("width", ["1m", "1d"])
def test_usage_of_a_kind_has_its_own_count(used: Deployment, width: str) -> None:
    query = {
        "start_time": int(time.time()) - 1800, "bucket_width": width, "limit": 90,
        "group_by": "model,label:team",
    }  # fmt: skip
    for each in ALL:
        url = f"{used.url}/v1/organization/usage/{each.name}"
        answer = httpx.get(url, params=query, headers=used.headers, timeout=60)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        check("UsageResponse", page)
        name, count = COUNTED[each.kind]
        results = [result for bucket in page["data"] for result in bucket["results"]]
        found = {
            result["labels"]["team"]: (result["model"], result[name], result["num_model_requests"])
            for result in results
        }
        if width == "1m":  # days have labels once the rated batches are summed
            assert found == dict.fromkeys(("search", "ads"), (MODEL, count, 1)), each.name
        else:
            assert sum(result["num_model_requests"] for result in results) == 2, each.name
