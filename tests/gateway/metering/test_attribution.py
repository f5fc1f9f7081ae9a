"""Figures of a live request that pages show: who issued its key, and what prompt order saved."""

import httpx
import pytest
from sqlalchemy import select

from core.clock import SystemClock
from core.ids import MEMBER, new_id
from core.tenants import keys
from core.tenants.models import Project
from core.tenants.scope import scope_of_member
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.prompts.test_prompt_order_http import TOOLS, ask, order


def test_usage_names_the_member_who_issued_the_key(deployment: Deployment) -> None:
    member_id = new_id(MEMBER)
    scope = scope_of_member(deployment.tenant_id, member_id, "owner")
    with deployment.services.database.transaction() as session:
        project = session.scalars(
            select(Project.id).where(Project.tenant_id == deployment.tenant_id)
        ).first()
        assert project is not None
        secret = keys.issue(session, scope, SystemClock(), project_id=project, name="mine").secret
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    url = f"{deployment.url}/v1/chat/completions"
    headers = {"authorization": f"Bearer {secret}"}
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
    assert deployment.last_event()["member_id"] == member_id
    assert httpx.post(url, json=body, headers=deployment.headers, timeout=60).status_code == 200
    assert deployment.last_event()["member_id"] is None


@pytest.mark.parametrize(("name", "saves"), [("safe", True), ("off", False)])
def test_cached_tokens_behind_a_changed_order_are_counted_as_saved_by_it(
    deployment: Deployment, name: str, saves: bool
) -> None:
    order(deployment, name)
    ask(deployment, TOOLS, "2026-11-22")
    assert deployment.last_event()["reordered_cached_tokens"] == 0  # nothing was cached yet
    ask(deployment, TOOLS[::-1] if saves else TOOLS, "2026-11-22")
    order(deployment, None)
    event = deployment.last_event()
    assert event["cached_tokens"] > 0
    # The tools come first in the prompt and are all in another place.
    assert event["reordered_cached_tokens"] == (event["cached_tokens"] if saves else 0)
