"""Pages about all that is stored of a tenant: the owner's download, closing, and the erasure."""

import io
import zipfile
from contextlib import closing

import httpx

from core.clock import SystemClock
from core.tenants import organisations
from core.tenants.models import Tenant
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment

EXPORTS = "/dashboard/exports"
EVERYTHING = f"{EXPORTS}/everything"


def test_an_owner_downloads_everything_and_nobody_else(deployment: Deployment) -> None:
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        assert "Download everything" in owner.get(EXPORTS).text
        answer = owner.get(EVERYTHING)
    assert answer.headers["content-disposition"].startswith("attachment")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        assert deployment.tenant_id in archive.read("tables/tenants.jsonl").decode()
    with closing(browser(deployment, with_role(deployment, "admin"))) as admin:
        assert "Download everything" not in admin.get(EXPORTS).text
        assert admin.get(EVERYTHING).status_code == 403


def test_an_operator_closes_and_erases_a_tenant(
    deployment: Deployment, operator: httpx.Client
) -> None:
    with deployment.services.database.transaction() as session:
        tenant = organisations.create_tenant(session, SystemClock(), name="to-end").id
    page = f"/dashboard/operator/tenants/{tenant}"
    shown = operator.get(page).text
    assert "Close the tenant" in shown and "Erase the tenant" not in shown
    early = operator.post(page, data={"act": "erase", "confirm": "to-end"})
    assert early.status_code == 409 and "Close it first" in early.text
    operator.post(page, data={"act": "status", "status": "closed", "confirm": "to-end"})
    assert "Erase the tenant" in operator.get(page).text
    wrong = operator.post(page, data={"act": "erase", "confirm": "demo"})
    assert wrong.status_code == 400
    done = operator.post(page, data={"act": "erase", "confirm": "to-end"})
    assert "The tenant was erased." in done.text
    with deployment.services.database.read() as session:
        assert session.get_one(Tenant, tenant).name.startswith("erased-")
