"""Who sees which page: casbin's matrix, and operator pages for nobody but the operator."""

import re
from contextlib import closing

import httpx
import pytest

from core.tenants.roles import MEMBER_ROLES
from dashboards.navigation import SECTIONS
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment

# By the default policy: what each role of a tenant may open.
VIEWER = {
    "/",
    "/usage",
    "/requests",
    "/projects",
    "/adapters",
    "/limits",
    "/playground",
    "/request-settings",
    "/prompts",
}
DEVELOPER = VIEWER | {"/keys", "/safety"}
ALLOWED = {
    "viewer": VIEWER,
    "developer": DEVELOPER,
    "finance": VIEWER | {"/costs", "/organisations", "/invoices", "/exports", "/webhooks"},
    "admin": DEVELOPER
    | {"/costs", "/organisations", "/team", "/exports", "/webhooks", "/single-sign-on"},
    "owner": {section.path for section in SECTIONS if not section.operator},
}
OPERATORS = [section.path for section in SECTIONS if section.operator]


@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_a_role_opens_its_pages_and_no_other(deployment: Deployment, role: str) -> None:
    with closing(browser(deployment, with_role(deployment, role))) as client:
        shown = set(re.findall(r'<li><a href="/dashboard([^"]*)"', client.get("/dashboard/").text))
        for section in SECTIONS:
            allowed = section.path in ALLOWED[role]
            answer = client.get(f"/dashboard{section.path}")
            assert answer.status_code == (200 if allowed else 403), section.path
            assert (section.path in shown) == allowed, section.path


@pytest.mark.parametrize("role", MEMBER_ROLES)
def test_no_role_of_a_tenant_acts_on_an_operator_page(deployment: Deployment, role: str) -> None:
    acts = ("create", "save", "decide", "free", "replay", "plan", "status")
    with closing(browser(deployment, with_role(deployment, role))) as client:
        for path in OPERATORS:
            assert client.get(f"/dashboard{path}?format=csv").status_code == 403, path
            for act in acts:
                answer = client.post(f"/dashboard{path}", data={"act": act, "confirm": "all"})
                assert answer.status_code in (400, 403, 405), (path, act, answer.status_code)
                assert "notice=" not in str(answer.url), (path, act)


def test_the_operator_opens_every_page(operator: httpx.Client) -> None:
    for section in SECTIONS:
        answer = operator.get(f"/dashboard{section.path}")
        assert answer.status_code == 200, section.path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"<[^>]+ style=|<script>|<[^>]*https?://(?!www\.w3\.org)", answer.text)
