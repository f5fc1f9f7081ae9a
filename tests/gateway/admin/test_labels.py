"""Labels over HTTP: what a project allows, what a request may say, and what usage and limits see."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from billing.rating.rating_worker import rate_all
from billing.usage.service_rollups import sum_all
from tests.gateway.deployment import MODEL, Deployment, running_deployment

ASK = [{"role": "user", "content": "Who pays?"}]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    path: Path = tmp_path_factory.mktemp("labels")
    with running_deployment(path) as deployment:
        projects = _admin(deployment, "get", "projects")["data"]
        shown = _admin(
            deployment,
            "put",
            f"projects/{projects[0]['id']}/labels",
            label_keys=["team", "feature"],
        )
        assert shown["label_keys"] == ["feature", "team"]
        time.sleep(1)
        yield deployment


def _admin(deployment: Deployment, method: str, path: str, **body: Any) -> Any:
    answer = httpx.request(
        method.upper(),
        f"{deployment.url}/admin/v1/{path}",
        headers=deployment.headers,
        json=body or None,
        timeout=60,
    )
    assert answer.status_code < 300, answer.text
    return answer.json()


def _chat(deployment: Deployment, labels: str = "", **body: Any) -> httpx.Response:
    headers = deployment.headers | ({"x-tollhouse-labels": labels} if labels else {})
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 4, **body}
    return httpx.post(
        f"{deployment.url}/v1/chat/completions", headers=headers, json=asked, timeout=60
    )


def test_metadata_and_a_header_label_a_request(labelled: Deployment) -> None:
    with OpenAI(base_url=f"{labelled.url}/v1", api_key=labelled.key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ASK,  # type: ignore[arg-type]
            max_tokens=4,
            metadata={"team": "search"},
            extra_headers={"x-tollhouse-labels": "feature=chat"},
        )
        response = client.responses.create(
            model=MODEL, input="Hi", max_output_tokens=4, metadata={"team": "ads", "order": "7"}
        )
    assert response.metadata == {"team": "ads", "order": "7"}
    assert answer.usage is not None
    events = labelled.events(2)
    found = {event["labels"]: event["output_tokens"] for event in events}
    assert found["feature=chat,team=search"] == answer.usage.completion_tokens
    assert "team=ads" in found
    rate_all(labelled.services.database, labelled.services.clock)
    sum_all(labelled.services.database, labelled.services.clock)
    query = {"start_time": int(time.time()) - 3600, "group_by": ["label:team"]}
    for path, value in (
        ("usage/completions", lambda result: result["output_tokens"]),
        ("costs", lambda result: result["amount"]["value"]),
    ):
        page = httpx.get(
            f"{labelled.url}/v1/organization/{path}",
            params=query,  # type: ignore[arg-type]
            headers=labelled.headers,
            timeout=60,
        ).json()
        sums = {
            result["labels"]["team"]: value(result)
            for bucket in page["data"]
            for result in bucket["results"]
        }
        assert {"search", "ads"} <= sums.keys()
        if path == "usage/completions":
            assert sums["search"] == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        ("team", {}, "which is not a list of labels"),
        ("team=a,team=b", {}, "each name once"),
        ("colour=red", {}, "'colour' is not a label of this project"),
        ("team=" + "x" * 65, {}, "1 to 64 printable characters"),
        ("", {"metadata": {"colour": "red"}}, "Its labels are feature, team."),
        ("", {"metadata": {"team": "a=b"}}, "without comma and ="),
    ],
)
def test_what_is_no_label_is_refused_by_name(
    labelled: Deployment, header: str, body: dict[str, Any], said: str
) -> None:
    answer = _chat(labelled, header, **body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_limit_of_a_label_holds_for_its_requests_alone(labelled: Deployment) -> None:
    rule = {"scope": "label", "unit": "requests", "limit": 1, "period_s": 3600}
    _admin(labelled, "put", "limits", target="team=slow", **rule)
    time.sleep(1)
    assert _chat(labelled, "team=slow").status_code == 200
    assert _chat(labelled, "team=slow,feature=x").status_code == 429
    assert _chat(labelled, "team=fast").status_code == 200
    assert _chat(labelled).status_code == 200
    refused = httpx.put(
        f"{labelled.url}/admin/v1/limits", headers=labelled.headers, json=rule | {"target": "slow"}
    )
    assert refused.status_code == 400
    assert "name=value" in refused.json()["error"]["message"]
