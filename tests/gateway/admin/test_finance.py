"""The finance API: OpenAI's shapes, the same numbers as the answers told, and files that agree."""

import csv
import io
import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from openai import OpenAI

from billing.exports import schedules
from billing.rating.rating_worker import rate_all
from billing.stores import DirectoryStore
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.serving.test_batches import line
from tests.gateway.serving.test_batches import start as start_batch
from tests.gateway.serving.test_batches import wait as wait_for_batch
from tests.openai_document import check

ASK = [{"role": "user", "content": "How are tokens counted?"}]


@pytest.fixture(scope="module")
def told(deployment: Deployment) -> dict[str, int]:
    """What the SDK was told over a few requests, once it is rated."""
    sums = {"requests": 0, "input": 0, "cached": 0, "output": 0}
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0, timeout=60
    ) as client:
        for _ in range(4):
            usage = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=6).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            sums["requests"] += 1
            sums["input"] += usage.prompt_tokens
            sums["cached"] += usage.prompt_tokens_details.cached_tokens or 0
            sums["output"] += usage.completion_tokens
    deployment.events(4)
    rate_all(deployment.services.database, deployment.services.clock)
    return sums


def get(deployment: Deployment, path: str, **query: Any) -> httpx.Response:
    answer = httpx.get(deployment.url + path, params=query, headers=deployment.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture
def hour_ago() -> int:
    return int(time.time()) - 3600


@pytest.mark.parametrize("width", ["1m", "1h", "1d"])
def test_usage_is_what_the_answers_told(
    deployment: Deployment, told: dict[str, int], hour_ago: int, width: str
) -> None:
    query = {"start_time": hour_ago, "bucket_width": width, "limit": 100, "group_by": "model"}
    page = get(deployment, "/v1/organization/usage/completions", **query).json()
    check("UsageResponse", page)
    results = [result for bucket in page["data"] for result in bucket["results"]]
    assert sum(r["num_model_requests"] for r in results) == told["requests"]
    assert sum(r["input_tokens"] for r in results) == told["input"]
    assert sum(r["input_cached_tokens"] for r in results) == told["cached"]
    assert sum(r["output_tokens"] for r in results) == told["output"]
    assert {r["model"] for r in results} == {MODEL}


def test_costs_are_the_same_money_as_the_export(
    deployment: Deployment, told: dict[str, int], hour_ago: int
) -> None:
    plain = get(deployment, "/v1/organization/costs", start_time=hour_ago).json()
    lines = get(
        deployment, "/v1/organization/costs", start_time=hour_ago, group_by="line_item"
    ).json()
    check("UsageResponse", plain)
    check("UsageResponse", lines)

    def total(page: dict[str, Any]) -> float:
        return sum(r["amount"]["value"] for bucket in page["data"] for r in bucket["results"])

    data = get(deployment, "/v1/exports", what="charges", format="csv").text
    charged = sum(float(row["amount"]) for row in csv.DictReader(io.StringIO(data)))
    assert (
        total(plain) == pytest.approx(total(lines), abs=1e-15) == pytest.approx(charged, abs=1e-15)
    )
    assert total(plain) > 0
    tokens = [
        r for bucket in lines["data"] for r in bucket["results"] if "output" in r["line_item"]
    ]
    assert sum(r["quantity"] for r in tokens) == told["output"]


def test_days_and_dates_may_be_those_of_a_time_zone(
    deployment: Deployment, told: dict[str, int]
) -> None:
    """Days of Kolkata begin at half past six of the evening before, UTC."""
    zone = ZoneInfo("Asia/Kolkata")
    today = datetime.now(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    first, after = today - timedelta(days=1), today + timedelta(days=1)
    for path in ("usage/completions", "costs"):
        buckets = get(
            deployment,
            f"/v1/organization/{path}",
            start_time=int(first.timestamp()) + 3600,
            end_time=int(after.timestamp()),
            time_zone="Asia/Kolkata",
        ).json()["data"]
        assert [(each["start_time"], each["end_time"]) for each in buckets] == [
            (int(first.timestamp()), int(today.timestamp())),
            (int(today.timestamp()), int(after.timestamp())),
        ]
        if path != "costs":
            counts = [r["output_tokens"] for bucket in buckets for r in bucket["results"]]
            assert sum(counts) == told["output"]
    span = {"what": "usage", "format": "csv", "time_zone": "Asia/Kolkata"}
    data = get(
        deployment, "/v1/exports", start=f"{first:%Y-%m-%d}", end=f"{after:%Y-%m-%d}", **span
    )
    assert len(list(csv.DictReader(io.StringIO(data.text)))) == told["requests"]
    earlier = get(deployment, "/v1/exports", start="2026-01-01", end="2026-01-02", **span)
    assert list(csv.DictReader(io.StringIO(earlier.text))) == []


def test_exports_in_lines_have_one_a_request(deployment: Deployment, told: dict[str, int]) -> None:
    rows = [
        json.loads(line)
        for line in get(deployment, "/v1/exports", format="jsonl").text.splitlines()
    ]
    assert len(rows) == told["requests"]
    assert sum(row["output_tokens"] for row in rows) == told["output"]
    assert get(deployment, "/v1/exports", what="focus", format="parquet").content[:4] == b"PAR1"


def test_focus_is_chosen_by_version_dataset_and_columns(deployment: Deployment) -> None:
    some = {"what": "focus", "columns": "InvoiceId, BilledCost"}
    assert get(deployment, "/v1/exports", **some).text.splitlines()[0] == "InvoiceId,BilledCost"
    old = get(deployment, "/v1/exports", what="focus", focus_version="1.2").text.splitlines()[0]
    assert "ProviderName" in old and "HostProviderName" not in old
    detail = get(deployment, "/v1/exports", what="focus", dataset="invoice-detail")
    assert "ReferenceInvoiceId" in detail.text.splitlines()[0]
    assert "focus-1.4-invoice-detail" in detail.headers["content-disposition"]
    schema = get(deployment, "/v1/exports/focus/schema", dataset="billing-period").json()
    assert schema["FocusVersion"] == "1.4"
    assert schema["ColumnDefinition"][-1]["ColumnName"] == "x_BillingAccountId"


def test_a_schedule_of_focus_is_changed_to_another_version(deployment: Deployment) -> None:
    url = deployment.url + "/admin/v1/export-schedules"
    body = {"what": "focus", "destination": "books", "focus_version": "1.3"}
    made = httpx.post(url, json=body, headers=deployment.headers, timeout=60).json()
    assert (made["focus_version"], made["dataset"]) == ("1.3", "cost-and-usage")

    def _change(change: dict[str, Any]) -> httpx.Response:
        mine = f"{url}/{made['id']}"
        return httpx.patch(mine, json=change, headers=deployment.headers, timeout=60)

    changed = _change({"focus_version": "1.4", "dataset": "invoice-detail"}).json()
    assert (changed["focus_version"], changed["dataset"]) == ("1.4", "invoice-detail")
    assert _change({"focus_version": "1.4", "paused": True}).json()["paused_at"]
    assert _change({"focus_version": "2.0"}).json()["error"]["param"] == "focus_version"
    assert _change({}).status_code == 400


def test_a_tenant_sees_its_scheduled_exports_and_no_others(
    deployment: Deployment, tmp_path: Path
) -> None:
    own, clock = deployment.tenant_id, deployment.services.clock
    with deployment.services.database.transaction() as session:
        for tenant_id in (own, "org_other"):
            schedules.schedule(
                session,
                clock,
                lambda destination: DirectoryStore(tmp_path / destination),
                what="usage",
                form="csv",
                destination="out",
                every="day",
                tenant_id=tenant_id,
            )
        schedules.create_due_jobs(session, clock.now() + timedelta(days=2))
    for path in ("/v1/exports/schedules", "/v1/exports/jobs"):
        found = get(deployment, path).json()["data"]
        assert found and {each["tenant_id"] for each in found} == {own}


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/v1/organization/usage/completions", {}, "start_time"),
        ("/v1/organization/usage/completions", {"start_time": "x"}, "start_time"),
        (
            "/v1/organization/usage/completions",
            {"start_time": 1, "bucket_width": "2d"},
            "bucket_width",
        ),
        ("/v1/organization/usage/completions", {"start_time": 1, "group_by": "mood"}, "group_by"),
        ("/v1/organization/usage/completions", {"start_time": 1, "page": "next"}, "page"),
        ("/v1/organization/costs", {"start_time": 1, "bucket_width": "1h"}, "bucket_width"),
        ("/v1/exports", {"what": "secrets"}, "what"),
        ("/v1/exports", {"format": "xls"}, "format"),
        ("/v1/exports", {"what": "focus", "focus_version": "1.7"}, "focus_version"),
        ("/v1/exports", {"what": "focus", "dataset": "prices"}, "dataset"),
        ("/v1/exports", {"what": "focus", "columns": "Colour"}, "columns"),
        ("/v1/exports", {"what": "usage", "focus_version": "1.4"}, "focus_version"),
        ("/v1/exports/focus/schema", {"focus_version": "9"}, "focus_version"),
        ("/v1/exports", {"start": "soon"}, "start"),
        ("/v1/exports", {"time_zone": "Mars/Base"}, "time_zone"),
        ("/v1/organization/costs", {"start_time": 1, "time_zone": "Mars/Base"}, "time_zone"),
    ],
)
def test_a_wrong_query_names_its_field(
    deployment: Deployment, path: str, query: dict[str, Any], param: str
) -> None:
    answer = httpx.get(deployment.url + path, params=query, headers=deployment.headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_nobody_reads_it_without_a_key(deployment: Deployment) -> None:
    for path in (
        "/v1/organization/usage/completions?start_time=1",
        "/v1/exports",
        "/v1/exports/jobs",
        "/v1/exports/schedules",
    ):
        assert httpx.get(deployment.url + path, timeout=60).status_code == 401


def test_usage_tells_batches_from_the_rest(deployment: Deployment, told: dict[str, int]) -> None:
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0, timeout=60
    ) as client:
        made = start_batch(client, line("a"), line("b"))
        wait_for_batch(client, made.id)
    deployment.events(told["requests"] + 2)
    rate_all(deployment.services.database, deployment.services.clock)
    since = int(time.time()) - 1800
    found = {}
    for width in ("1m", "1d"):
        query = {"start_time": since, "bucket_width": width, "limit": 90, "group_by": "batch"}
        page = get(deployment, "/v1/organization/usage/completions", **query).json()
        results = [each for bucket in page["data"] for each in bucket["results"]]
        found[width] = {
            flag: sum(each["num_model_requests"] for each in results if each["batch"] is flag)
            for flag in (True, False)
        }
    assert found["1m"] == found["1d"] and found["1d"][True] == 2 <= found["1d"][False]
    page = get(
        deployment, "/v1/organization/usage/completions", start_time=since, limit=2, batch="true"
    ).json()
    counted = [each for bucket in page["data"] for each in bucket["results"]]
    assert sum(each["num_model_requests"] for each in counted) == 2
    assert {each["batch"] for each in counted} == {None}, "told only where it was asked for"
    wrong = httpx.get(
        f"{deployment.url}/v1/organization/usage/completions",
        params={"start_time": since, "batch": "perhaps"},
        headers=deployment.headers,
        timeout=60,
    )
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "batch"
