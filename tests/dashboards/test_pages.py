"""The pages of a running gateway: signing in, strict headers, one tenant's figures, keys that work."""

import re
import time
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from billing.rating.rating_worker import rate_all
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment

PAGES = (
    *("/", "/usage", "/costs", "/requests", "/keys", "/adapters", "/limits", "/invoices"),
    *("/safety", "/playground", "/team"),
)


def test_a_stranger_is_sent_to_sign_in(deployment: Deployment) -> None:
    with closing(browser(deployment)) as stranger:
        for path in PAGES:
            answer = stranger.get(f"/dashboard{path}")
            assert answer.url.path == "/dashboard/sign-in"


def test_a_wrong_key_is_told_so(deployment: Deployment) -> None:
    with closing(browser(deployment)) as stranger:
        answer = stranger.post("/dashboard/sign-in", data={"secret": "th_wrong"})
    assert answer.status_code == 401
    assert "Incorrect API key" in answer.text


@pytest.mark.parametrize("path", PAGES)
def test_every_page_opens_with_strict_headers(owner: httpx.Client, path: str) -> None:
    answer = owner.get(f"/dashboard{path}")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert not re.search(r"<[^>]+ style=|<script>|https?://(?!www\.w3\.org)", answer.text)


def test_the_page_the_csv_and_the_answer_agree(deployment: Deployment, owner: httpx.Client) -> None:
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0, timeout=60
    ) as client:
        usage = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        ).usage
    assert usage is not None
    deployment.events(1)
    rate_all(deployment.services.database, deployment.services.clock)
    page = owner.get("/dashboard/usage").text
    assert f'<td class="num">{usage.prompt_tokens}</td>' in page
    csv = owner.get("/dashboard/usage?format=csv").text.splitlines()
    assert csv[1].split(",")[0] == MODEL
    assert csv[1].split(",")[2] == str(usage.prompt_tokens)


def test_a_key_made_on_the_page_works_and_ends_when_revoked(
    deployment: Deployment, owner: httpx.Client
) -> None:
    page = owner.get("/dashboard/keys").text
    project = re.search(r'<option value="(proj_[^"]+)"', page)
    assert project is not None
    made = owner.post(
        "/dashboard/keys", data={"act": "create", "name": "mine", "project_id": project[1]}
    ).text
    shown = re.search(r'id="once">(th_\w+)<', made)
    assert shown is not None
    assert shown[1] not in owner.get("/dashboard/keys").text
    with OpenAI(
        base_url=f"{deployment.url}/v1", api_key=shown[1], max_retries=0, timeout=60
    ) as client:
        assert client.models.list().data
        rows = re.findall(r'name="key_id" value="(key_[^"]+)"', owner.get("/dashboard/keys").text)
        refused = owner.post(
            "/dashboard/keys", data={"act": "revoke", "key_id": rows[-1], "confirm": "no"}
        )
        assert refused.status_code == 400
        owner.post("/dashboard/keys", data={"act": "revoke", "key_id": rows[-1], "confirm": "mine"})
        deadline = time.monotonic() + 60
        with pytest.raises(AuthenticationError):
            while time.monotonic() < deadline:
                client.models.list()
                time.sleep(0.1)


def test_a_key_made_on_the_page_uses_only_the_models_that_it_names(
    deployment: Deployment, owner: httpx.Client
) -> None:
    page = owner.get("/dashboard/keys").text
    project = re.search(r'<option value="(proj_[^"]+)"', page)
    assert project is not None
    fields = {"act": "create", "name": "narrow", "project_id": project[1]}
    wrong = owner.post("/dashboard/keys", data={**fields, "models": f"{MODEL}, tinny"})
    assert wrong.status_code == 400 and "tinny" in wrong.text and "th_" not in wrong.text
    made = owner.post("/dashboard/keys", data={**fields, "models": f" {MODEL} ,"}).text
    shown = re.search(r'id="once">(th_\w+)<', made)
    assert shown is not None
    rows = [row for row in owner.get("/dashboard/keys").text.split("<tr") if "narrow" in row]
    assert len(rows) == 1 and MODEL in rows[0]
    served = deployment.services.catalog
    served.serve(replace(served.first(), name="second"))
    messages = [{"role": "user", "content": "Hello"}]
    for name, status in ((MODEL, 200), ("second", 403), ("third", 404)):
        answer = httpx.post(
            f"{deployment.url}/v1/chat/completions",
            json={"model": name, "messages": messages, "max_tokens": 2},
            headers={"authorization": f"Bearer {shown[1]}"},
            timeout=60,
        )
        assert answer.status_code == status, answer.text
        assert status == 200 or name in answer.json()["error"]["message"]
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=shown[1], timeout=60) as client:
        assert [each.id for each in client.models.list()] == [MODEL]


def test_a_viewer_sees_less_and_changes_nothing(deployment: Deployment) -> None:
    with closing(browser(deployment, with_role(deployment, "viewer"))) as viewer:
        assert viewer.get("/dashboard/usage").status_code == 200
        assert viewer.get("/dashboard/costs").status_code == 403
        assert "Costs</a>" not in viewer.get("/dashboard/usage").text
        assert (
            viewer.post("/dashboard/keys", data={"act": "create", "name": "x"}).status_code == 403
        )


def test_a_form_from_another_site_is_refused(owner: httpx.Client) -> None:
    answer = owner.post(
        "/dashboard/keys", data={"act": "create"}, headers={"origin": "https://evil.example"}
    )
    assert answer.status_code == 403


def test_signing_out_ends_the_session(deployment: Deployment) -> None:
    with closing(browser(deployment, deployment.key)) as client:
        cookie = client.cookies["tollhouse_session"]
        client.post("/dashboard/sign-out")
        client.cookies.set("tollhouse_session", cookie)
        assert client.get("/dashboard/").url.path == "/dashboard/sign-in"


@pytest.mark.parametrize("query", ["from=soon", "from=2026-02-01&to=2026-01-01", "by=mood"])
def test_a_wrong_filter_is_told(owner: httpx.Client, query: str) -> None:
    assert owner.get(f"/dashboard/usage?{query}").status_code == 400


def test_a_request_opens_to_its_tokens_and_its_price(
    deployment: Deployment, owner: httpx.Client
) -> None:
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions",
        json={"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
        headers=deployment.headers,
        timeout=60,
    )
    request_id = answer.headers["x-request-id"]
    deployment.events(1)
    deadline = time.monotonic() + 60
    while request_id not in owner.get("/dashboard/requests").text:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    rate_all(deployment.services.database, deployment.services.clock)
    page = owner.get(f"/dashboard/requests/{request_id}").text
    assert f"{answer.json()['usage']['completion_tokens']}</dd>" in re.sub(
        r"<small>.*?</small>", "", page
    )
    assert "Ledger transaction" in page
    assert owner.get("/dashboard/requests/req_nobody").status_code == 404


def test_every_section_of_the_navigation_opens(owner: httpx.Client) -> None:
    links = re.findall(r'<li><a href="(/dashboard[^"]*)"', owner.get("/dashboard/").text)
    assert len(links) >= 11
    for link in links:
        assert owner.get(link).status_code == 200, link


def test_no_backtick_of_a_message_reaches_a_browser(owner: httpx.Client) -> None:
    """Titles are attributes, which have no markup; what is typed stays as it is."""
    for answer in (
        owner.get("/dashboard/adapters?notice=adapter-added"),
        owner.get("/dashboard/usage?from=never"),
        owner.get("/dashboard/operator/tenants"),
        owner.get("/dashboard/keys"),
        owner.get("/dashboard/webhooks"),
        owner.get("/dashboard/playground"),
    ):
        shown = re.sub(r"<textarea.*?</textarea>", "", answer.text, flags=re.S)
        assert "`" not in shown, (answer.url, shown[shown.index("`") - 200 :][:400])


def test_no_backtick_reaches_the_operator(deployment: Deployment) -> None:
    with closing(browser(deployment, deployment.services.operator_token)) as client:
        for path in ("health", "engines", "dead-letters", "prices", "reconciliation", "tenants"):
            text = client.get(f"/dashboard/operator/{path}").text
            assert "`" not in text, (path, text[max(0, text.index("`") - 200) :][:400])


@pytest.mark.parametrize("by", ["end_user", "engine_id", "region"])
def test_days_by_origin_take_any_range_and_single_requests_a_week(
    owner: httpx.Client, by: str
) -> None:
    months = f"/dashboard/usage?by={by}&q=since:2026-06-01 until:2026-09-30"
    assert owner.get(months).status_code == 200
    refused = owner.get(f"{months} model:tiny")
    assert refused.status_code == 400 and "reads single requests" in refused.text
