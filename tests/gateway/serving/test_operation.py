"""Health, readiness, metrics and the API's own document."""

import httpx
from openai import OpenAI

from tests.gateway.deployment import MODEL, Deployment


def test_health_readiness_and_docs(deployment: Deployment) -> None:
    assert httpx.get(f"{deployment.url}/healthz").json() == {"status": "ok"}
    ready = httpx.get(f"{deployment.url}/readyz")
    assert ready.status_code == 200 and ready.json()["parts"]["engine fake"]["ready"]
    assert httpx.get(f"{deployment.url}/docs").status_code == 200


def test_the_bare_address_leads_to_the_pages(deployment: Deployment) -> None:
    answer = httpx.get(f"{deployment.url}/")
    assert answer.status_code == 307 and answer.headers["location"] == "/dashboard/"


def test_metrics_count_what_was_answered(deployment: Deployment, client: OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    page = httpx.get(f"{deployment.url}/metrics").text
    assert 'tollhouse_requests_total{route="/v1/chat/completions",status="200"}' in page
    assert f'tollhouse_tokens_total{{kind="output",model="{MODEL}"}}' in page


def test_an_unknown_path_is_a_404_in_the_same_shape(deployment: Deployment) -> None:
    answer = httpx.get(f"{deployment.url}/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
