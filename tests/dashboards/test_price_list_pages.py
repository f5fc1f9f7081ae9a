"""Price lists by API and page: shown first, saved as a whole, and nothing for a list that is refused."""

import json

import httpx
import pytest
from sqlalchemy import func, select

from billing.pricing.tables import PriceVersionRow
from core.tenants.models import AuditEntry
from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/prices"
API = "/admin/v1/prices/import"


def _content(*models: str, rate: str = "3") -> str:
    rates = {"input": rate, "output": "15", "search": "0.01"}
    return json.dumps({"prices": [{"model": each, "rates": rates} for each in models]})


def _versions(deployment: Deployment) -> int:
    with deployment.services.database.read() as session:
        return session.scalar(select(func.count()).select_from(PriceVersionRow)) or 0


def _imports(deployment: Deployment) -> list[AuditEntry]:
    query = select(AuditEntry).where(AuditEntry.action == "price.import")
    with deployment.services.database.read() as session:
        return list(session.scalars(query))


def test_the_api_shows_and_saves_a_list_with_its_mark_up(
    deployment: Deployment, operator: httpx.Client
) -> None:
    body = {"content": _content("a", "b"), "models": {"a": "claude"}, "markup": "20%"}
    before = _versions(deployment)
    shown = operator.post(API, json=body | {"dry_run": True}).json()
    rows = {each["component"]: (each["model"], each["after"]) for each in shown["changes"]}
    # 3 and 15 a million, and 0.01 a search, with a fifth more
    assert rows == {
        "input": ("claude", "3.6"),
        "output": ("claude", "18"),
        "search": ("claude", "0.012"),
    }
    assert not shown["saved"] and _versions(deployment) == before and not _imports(deployment)
    saved = operator.post(API, json=body).json()
    assert saved["saved"] and saved["changes"] == shown["changes"]
    assert _versions(deployment) == before + 1
    (noted,) = _imports(deployment)
    assert noted.after is not None and noted.after["changes"] == shown["changes"]
    assert operator.post(API, json=body).json()["changes"] == []
    assert _versions(deployment) == before + 1 and len(_imports(deployment)) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"content": "{", "all": True}, "not JSON"),
        ({"content": _content("a")}, "which models"),
        ({"content": _content("a"), "all": True, "models": {"a": ""}}, "which models"),
        ({"content": _content("a"), "models": {"c": ""}}, "no model 'c'"),
        ({"content": _content("a"), "all": True, "markup": "-100"}, "mark-up"),
        ({"content": _content("a", rate="-1"), "all": True}, "negative"),
        ({"content": _content("a", "a"), "all": True}, "twice"),
    ],
)
def test_a_list_that_is_refused_saves_nothing(
    deployment: Deployment, operator: httpx.Client, body: dict[str, object], said: str
) -> None:
    before = _versions(deployment)
    refused = operator.post(API, json=body)
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]
    assert _versions(deployment) == before


def test_the_page_shows_before_it_saves(deployment: Deployment, operator: httpx.Client) -> None:
    given = {"content": _content("nova", rate="7"), "models": "nova=mine", "markup": "100"}
    before = _versions(deployment)
    shown = operator.post(PAGE, data=given | {"act": "preview"})
    assert "Nothing is saved yet" in shown.text and "Save these prices" in shown.text
    assert "mine" in shown.text and _versions(deployment) == before
    saved = operator.post(PAGE, data=given | {"act": "import"})
    assert saved.status_code == 200 and _versions(deployment) == before + 1
    (row,) = operator.get("/admin/v1/prices?model=mine").json()["data"]
    assert row["terms"]["rates"]["input"]["tiers"] == [[None, 14_000_000, 0]]  # pico a token
    refused = operator.post(PAGE, data=given | {"act": "import", "models": "other"})
    assert "no model" in refused.text and _versions(deployment) == before + 1
