"""Figures that live requests write and pages show: what prompt order saved, and who used a key.

The requests pass the gateway; nothing here writes a usage event or a summary of them.
"""

import re
import time
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.prompts.test_prompt_order_http import TOOLS, ask, order

EMAIL, PASSWORD = "ada@example.com", "a long enough password"
PRICE = {"input": "10000", "cached_input": "5000", "output": "1"}  # US dollars per million tokens
SAVED_PER_TOKEN = Decimal("0.005")  # US dollars
BLOCK = 16  # tokens


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with running_deployment(tmp_path) as running:
        yield running


def _account(deployment: Deployment, requests: int) -> None:
    """What the worker does every few seconds."""
    deployment.events(requests)
    rate_all(deployment.services.database, deployment.services.clock)
    service_rollups.sum_all(deployment.services.database, deployment.services.clock)


def _tile(page: str, label: str) -> tuple[str, str]:
    """(value, note) of a tile on a page."""
    lines = re.sub(r"<[^>]+>", "\n", page[page.index(label) :]).splitlines()
    _, value, note, *_ = [line.strip() for line in lines if line.strip()]
    return value, note


@pytest.mark.parametrize("saves", [True, False])
def test_the_costs_page_shows_what_prompt_order_saved(deployment: Deployment, saves: bool) -> None:
    with closing(browser(deployment, deployment.services.operator_token)) as operator:
        terms = {"act": "save", "model": MODEL, "currency": "USD", **PRICE}
        assert "saved" in operator.post("/dashboard/operator/prices", data=terms).text
    deployment.services.prices.refresh()
    second = TOOLS[::-1] if saves else TOOLS  # in the same order there is nothing to save
    order(deployment, "safe")
    ask(deployment, TOOLS, "2026-11-22")
    usage = ask(deployment, second, "2026-11-22").json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    _account(deployment, 2)
    with closing(browser(deployment, deployment.key)) as owner:
        money, note = _tile(owner.get("/dashboard/costs").text, "Saved by prompt order")
    tokens = int(note.removesuffix(" tokens"))

    # The reference: what the first prompt would have cached of the second, both as they were given.
    order(deployment, "off")
    for tools in (TOOLS, second):
        ask(deployment, tools, "2026-11-22")
    first, given = (request.prompt for request in deployment.engine.submitted[-2:])
    pairs = zip(first, given, strict=True)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    owed = max(0, cached - same // BLOCK * BLOCK)
    assert owed <= tokens <= 1.2 * owed  # an estimate by parts: it leaves out the template
    assert (owed > 0) is saves
    assert Decimal(money.removesuffix(" USD")) == tokens * SAVED_PER_TOKEN


def test_usage_by_member_is_that_of_the_keys_which_the_member_issued(
    deployment: Deployment,
) -> None:
    with closing(browser(deployment, deployment.key)) as owner:
        member_id = _add_member(owner, deployment)
        with closing(browser(deployment)) as ada:
            signed_in = ada.post("/dashboard/sign-in", data={"email": EMAIL, "password": PASSWORD})
            assert signed_in.status_code == 200, signed_in.text
            secret = _create_key(ada)
        totals = [_send(deployment, key) for key in (secret, deployment.key, secret)]
        _account(deployment, 3)
        page = owner.get("/dashboard/usage?by=member_id").text
        assert EMAIL in page

    start = int(time.time()) - 3600
    grouped = _usage(deployment, start_time=start, group_by="user_id")
    assert {each["user_id"]: each["num_model_requests"] for each in grouped} == {
        member_id: 2,
        None: 1,
    }
    (own,) = _usage(deployment, start_time=start, user_ids=member_id)
    assert own["input_tokens"] + own["output_tokens"] == totals[0] + totals[2]


def _add_member(owner: httpx.Client, deployment: Deployment) -> str:
    fields = {"act": "add", "email": EMAIL, "role": "admin", "name": "Ada"}
    page = owner.post("/dashboard/team", data=fields).text
    found = re.search(r'name="member" value="([^"]+)"', page)
    assert found is not None, page
    answer = httpx.put(
        f"{deployment.url}/admin/v1/members/{found[1]}/password",
        json={"password": PASSWORD},
        headers=deployment.headers,
    )
    assert answer.status_code == 200, answer.text
    return found[1]


def _create_key(member: httpx.Client) -> str:
    project = re.search(r'<option value="(proj_[^"]+)"', member.get("/dashboard/keys").text)
    assert project is not None
    fields = {"act": "create", "name": "mine", "project_id": project[1], "role": "developer"}
    secret = re.search(r"th_\w{30,}", member.post("/dashboard/keys", data=fields).text)
    assert secret is not None
    return secret[0]


def _send(deployment: Deployment, key: str) -> int:
    """The total tokens that the response reports."""
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions",
        json={"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]},
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["total_tokens"])


def _usage(deployment: Deployment, **query: Any) -> list[dict[str, Any]]:
    answer = httpx.get(
        f"{deployment.url}/v1/organization/usage/completions",
        params={"bucket_width": "1d", **query},
        headers=deployment.headers,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]
