"""Alerts that could never arrive are refused when they are saved."""

from contextlib import closing

import httpx
import pytest

from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment, running_deployment

BUDGET = {"scope": "tenant", "cap": "5.00", "window": "month"}
PRIVATE = [
    "http://127.0.0.1:9/hook",
    "https://10.1.2.3/hook",
    "http://169.254.169.254/latest",
    "http://[::1]/hook",
    "http://localhost/hook",
]


def save(deployment: Deployment, **more: object) -> httpx.Response:
    url = f"{deployment.url}/admin/v1/budgets"
    return httpx.post(url, json={**BUDGET, **more}, headers=deployment.headers, timeout=60)


@pytest.mark.parametrize("url", PRIVATE)
def test_a_private_webhook_is_refused_by_the_api_and_by_both_pages(
    deployment: Deployment, url: str
) -> None:
    refused = save(deployment, webhooks=[url])
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == "webhooks" and "TOLLHOUSE_WEBHOOK_NETWORKS" in error["message"]
    with closing(browser(deployment, deployment.key)) as owner:
        added = owner.post("/dashboard/webhooks", data={"act": "add", "url": url})
        assert added.status_code == 400 and "private address" in added.text
        fields = {"act": "budget", "cap": "5", "webhook": url, "window": "month"}
        budget = owner.post("/dashboard/limits", data=fields)
        assert budget.status_code == 400 and "private address" in budget.text


def test_mail_without_a_server_is_refused_and_names_the_setting(deployment: Deployment) -> None:
    refused = save(deployment, emails=["boss@example.com"])
    assert refused.status_code == 400
    assert "TOLLHOUSE_SMTP_URL" in refused.json()["error"]["message"]
    with closing(browser(deployment, deployment.key)) as owner:
        fields = {"act": "budget", "cap": "5", "email": "boss@example.com", "window": "month"}
        page = owner.post("/dashboard/limits", data=fields)
        assert page.status_code == 400 and "no mail server" in page.text


def test_what_can_arrive_is_saved(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"webhook_networks": ("10.0.0.0/8",), "smtp_url": "smtp://127.0.0.1:2525"}
    with running_deployment(tmp_path_factory.mktemp("allowed"), settings=settings) as made:
        saved = save(made, webhooks=["https://10.1.2.3/hook"], emails=["boss@example.com"])
        assert saved.status_code == 201, saved.text
        assert save(made, webhooks=["https://192.168.0.1/hook"]).status_code == 400
