"""Changes made on the pages: each is in force, asks for the name where it destroys, and is on the log."""

import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from billing.accounts.accounts import ensure_account
from billing.payments import posting
from billing.payments.fake import FakePayments
from core.dead_letters import keeper
from core.events import ModerationEvent
from core.queue import TASKS
from core.tenants.keys import all_of, is_live, issue, rotate
from core.tenants.limits import set_rule
from core.tenants.models import ApiKey
from core.tenants.organisations import projects
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from moderation.records import store
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment, running_deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"smtp_url": "smtp://127.0.0.1:2525"}
    with running_deployment(tmp_path_factory.mktemp("changes"), settings=settings) as made:
        yield made


def send(client: httpx.Client, path: str, **fields: str) -> httpx.Response:
    return client.post(f"/dashboard{path}", data=fields)


def field(page: str, name: str) -> str:
    found = re.search(rf'name="{name}" value="([^"]+)"', page)
    assert found is not None, name
    return found[1]


def test_a_member_is_added_changed_and_removed_by_name(
    owner: httpx.Client, deployment: Deployment
) -> None:
    answer = send(owner, "/team", act="add", email="ada@example.com", role="finance", name="Ada")
    assert "A link was mailed to the member." in answer.text and "ada@example.com" in answer.text
    member = field(answer.text, "member")
    assert "admin" in send(owner, "/team", act="role", member=member, role="admin").text
    refused = send(owner, "/team", act="remove", member=member, confirm="Ada")
    assert refused.status_code == 400
    removed = send(owner, "/team", act="remove", member=member, confirm="ada@example.com").text
    assert "disabled" in removed and "member.change" in removed
    assert ">Enable<" in removed
    assert send(owner, "/team", act="role", member="mem_other", role="viewer").status_code == 404


def test_a_notice_is_a_known_word_and_never_text_of_the_url(owner: httpx.Client) -> None:
    assert "Pay here" not in owner.get("/dashboard/team?notice=Pay+here").text


def test_a_limit_and_a_budget_are_set_shown_and_ended(owner: httpx.Client) -> None:
    page = send(
        owner, "/limits", act="set", unit="requests", scope="key", period="60", limit="7"
    ).text
    assert "The limit is in force." in page and "key" in page
    too_much = send(
        owner, "/limits", act="set", unit="requests", scope="tenant", period="60", limit="99999999"
    )
    assert too_much.status_code == 403
    target = re.search(r'<option value="(tenant:[^"]+)"', page)
    assert target is not None
    made = send(
        owner,
        "/limits",
        act="budget",
        name="Spring",
        target=target[1],
        cap="12.50",
        window="month",
        hard="hard",
        thresholds="50, 100",
        email="money@example.com",
    ).text
    assert "12.50" in made and "Spring" in made and "hard" in made
    assert "money@example.com" in owner.get("/dashboard/webhooks").text
    budget = field(made, "budget")
    assert send(owner, "/limits", act="end", budget=budget, confirm="x").status_code == 400
    assert "has ended" in send(owner, "/limits", act="end", budget=budget, confirm="Spring").text
    dropped = send(
        owner,
        "/limits",
        act="drop",
        unit="requests",
        scope="key",
        period="60",
        target="",
        confirm="key:requests:60",
    )
    assert "limit of the plan applies again" in dropped.text


def test_what_is_used_and_what_was_refused_is_counted(
    owner: httpx.Client, deployment: Deployment
) -> None:
    send(owner, "/limits", act="set", unit="requests", scope="tenant", period="86400", limit="1")
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    url = f"{deployment.url}/v1/chat/completions"
    statuses = set()
    for _ in range(60):
        answer = httpx.post(url, json=body, headers=deployment.headers, timeout=60)
        statuses.add(answer.status_code)
        if answer.status_code == 429:
            break
    assert statuses == {200, 429}
    deployment.services.rejections.flush()
    page = owner.get("/dashboard/limits").text
    assert "1 of 1" in page
    row = re.search(r"Requests per day, per tenant</td>\s*<td class=\"num\">(\d+)<", page)
    assert row is not None and int(row[1]) >= 1
    send(
        owner,
        "/limits",
        act="drop",
        unit="requests",
        scope="tenant",
        period="86400",
        confirm="tenant:requests:86400",
    )


def _adapter(rank: int = 2) -> bytes:
    out = io.BytesIO()
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny",
    }
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{name}.lora_A.weight": np.ones((rank, 8), np.float32),
        f"{name}.lora_B.weight": np.ones((8, rank), np.float32),
    }
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("adapter_config.json", json.dumps(config))
        archive.writestr("adapter_model.safetensors", save(weights))
    return out.getvalue()


def _preload(owner: httpx.Client, operator: httpx.Client, name: str) -> None:
    """By an operator: each engine loads it although no request has named it."""
    assert ">Preload<" not in owner.get("/dashboard/adapters").text
    act = {"act": "preload", "name": name}
    assert owner.post("/dashboard/adapters", data=act).status_code == 403
    assert "1 host" not in operator.get("/dashboard/adapters").text
    assert "within seconds" in operator.post("/dashboard/adapters", data=act).text
    unknown = operator.post("/dashboard/adapters", data=act | {"name": "nobody"})
    assert unknown.status_code == 404 and "no adapter" in unknown.text
    deadline = time.monotonic() + 60
    while "1 host" not in operator.get("/dashboard/adapters").text:
        assert time.monotonic() < deadline, "the adapter was not preloaded"
        time.sleep(0.1)


def test_an_adapter_is_checked_uploaded_preloaded_and_removed_by_name(
    owner: httpx.Client, operator: httpx.Client
) -> None:
    fields = {"act": "add", "name": "poet", "base": MODEL}

    def _send(content: bytes) -> httpx.Response:
        files = {"archive": ("poet.zip", content, "application/zip")}
        return owner.post("/dashboard/adapters", data=fields, files=files)

    refused = _send(b"not an archive")
    assert refused.status_code == 400
    assert "The adapter is invalid" in refused.text
    taken = _send(_adapter())
    assert "The adapter is valid and registered" in taken.text and "tiny:poet" in taken.text
    assert "tiny:poet" in owner.get("/dashboard/playground").text
    _preload(owner, operator, "poet")
    gone = owner.post("/dashboard/adapters", data={"act": "remove", "name": "poet", "confirm": "p"})
    assert gone.status_code == 400
    gone = owner.post(
        "/dashboard/adapters", data={"act": "remove", "name": "poet", "confirm": "poet"}
    )
    assert "tiny:poet" not in gone.text


@pytest.fixture
def decision(deployment: Deployment) -> str:
    """A blocked request on the books."""
    services = deployment.services
    event = ModerationEvent(
        request_id="req_blocked",
        tenant_id=deployment.tenant_id,
        project_id="proj_x",
        key_id="key_x",
        at=services.clock.now() - timedelta(minutes=5),
        direction="input",
        action="block",
        policy_version="pol_x",
        text_sha256="0" * 64,
        categories=("hate",),
        scores={"hate": 0.97},
        spans=(),
        view="plain",
        unscanned=False,
    )
    with services.database.transaction() as session:
        store(session, [event])
    return event.request_id


def test_a_policy_is_tried_on_what_was_recorded_and_put_in_force(
    owner: httpx.Client, decision: str
) -> None:
    assert "1" in owner.get("/dashboard/safety").text
    tried = send(owner, "/safety/policy", act="threshold", category="hate", block="0.99").text
    assert "Tested on" in tried and re.search(r"block</td>\s*<td[^>]*>(allow|annotate)", tried)
    document = re.search(r'<textarea name="document"[^>]*>(.*?)</textarea>', tried, re.DOTALL)
    assert document is not None
    text = document[1].replace("&#34;", '"').replace("&quot;", '"')
    assert json.loads(text)["input"]["categories"]["hate"] == {
        "annotate": None,
        "redact": None,
        "block": 0.99,
    } or json.loads(text)["input"]["categories"]["hate"] == {"block": 0.99}
    assert "The default policy is in force." in owner.get("/dashboard/safety/policy").text
    page = owner.get("/dashboard/safety/policy").text
    place = re.search(r'<option value="(tenant:[^"]+)"', page)
    assert place is not None
    broken = send(owner, "/safety/policy", act="put", place=place[1], document='{"mode": "loud"}')
    assert broken.status_code == 400 and "mode" in broken.text
    rules = {**json.loads(text)}
    rules["input"]["deny"] = ["zorgblat"]
    wanted = {"place": place[1], "document": json.dumps(rules)}
    tried = send(owner, "/safety/policy", act="try", sample="A zorgblat!", **wanted).text
    assert "Not tried" in tried and "phrase &#39;zorgblat&#39;" in tried
    assert "Would change at least" in tried
    assert re.search(r"prompt</td>\s*<td[^>]*>.*?block", tried, re.DOTALL)
    counted = send(owner, "/safety/policy", act="trial", **wanted).text
    document = re.search(r'<textarea name="document"[^>]*>(.*?)</textarea>', counted, re.DOTALL)
    assert document is not None
    shown = json.loads(document[1].replace("&#34;", '"').replace("&quot;", '"'))
    assert shown["input"]["deny"] == [
        {"text": "zorgblat", "action": "annotate", "category": "deny_list"}
    ]
    put = send(owner, "/safety/policy", act="put", place=place[1], document=text).text
    assert "The policy is in force." in put and "active" in put
    retired = send(
        owner, "/safety/policy", act="retire", place=place[1], confirm="the organisation"
    ).text
    assert "policy was retired" in retired


def test_an_appeal_is_opened_by_the_tenant_and_decided_by_the_operator(
    owner: httpx.Client, operator: httpx.Client, decision: str
) -> None:
    page = send(
        owner, "/safety", act="appeal", request=decision, direction="input", reason="A quote"
    )
    assert "A quote" in page.text and "open" in page.text
    queue = operator.get("/dashboard/operator/safety").text
    assert "hate 0.97" in queue and "A quote" in queue
    decided = send(
        operator,
        "/operator/safety",
        act="decide",
        appeal=field(queue, "appeal"),
        verdict="Grant",
        answer="You are right.",
    )
    assert "The appeal was decided." in decided.text
    assert "You are right." in owner.get("/dashboard/safety").text


def test_a_tenant_is_made_moved_and_suspended_by_name(operator: httpx.Client) -> None:
    made = send(
        operator, "/operator/tenants", act="create", name="acme", plan="free", currency="EUR"
    )
    assert "The tenant was created." in made.text
    path = made.url.path.removeprefix("/dashboard")
    assert "standard" in send(operator, path, act="plan", plan="standard").text
    refused = send(operator, path, act="status", status="suspended", confirm="acm")
    assert refused.status_code == 400
    assert (
        "suspended" in send(operator, path, act="status", status="suspended", confirm="acme").text
    )


def test_the_operator_chooses_whose_pages_are_shown(
    deployment: Deployment, operator: httpx.Client, owner: httpx.Client
) -> None:
    made = send(operator, "/operator/tenants", act="create", name="harbour", display_name="Harbour")
    tenant_id = made.url.path.rpartition("/")[2]
    shown = send(operator, "/operator/look", act="look", tenant="harbour", page="/usage")
    assert shown.url.path == "/dashboard/usage"
    assert "viewing <strong>Harbour</strong>" in shown.text
    assert "operator.look" in operator.get("/dashboard/team").text
    assert send(operator, "/operator/look", act="look", tenant="nobody").status_code == 404
    send(operator, "/operator/tenants", act="create", name="harbour-two", display_name="Quay")
    assert (
        "viewing <strong>Quay</strong>"
        in send(operator, "/operator/look", act="look", tenant="QUAY").text
    )
    several = send(operator, "/operator/look", act="look", tenant="Harb")
    assert several.status_code == 404 and "harbour, harbour-two." in several.text
    assert send(operator, "/operator/look", act="look", tenant="%").status_code == 404
    assert send(operator, "/operator/look", act="look", tenant=" ").status_code == 404
    away = send(operator, "/operator/look", act="look", tenant=tenant_id, page="//evil.example")
    assert away.url.path == "/dashboard/"
    with closing(browser(deployment, deployment.services.operator_token)) as second:
        assert "Harbour" not in second.get("/dashboard/usage").text  # a choice is of one session
    assert send(owner, "/operator/look", act="look", tenant="harbour").status_code == 403
    send(operator, "/operator/look", act="look", tenant=deployment.tenant_id)


def test_an_endpoint_takes_messages_as_its_receiver_reads_them(owner: httpx.Client) -> None:
    url = "https://1.1.1.1/services/T0"
    for wrong, said in (
        ({"format": "irc"}, "There is no format"),
        ({"format": "pagerduty"}, "which needs one"),
        ({"format": "slack", "routing_key": "R0"}, "is for PagerDuty"),
    ):
        refused = send(owner, "/webhooks", act="add", url=url, **wrong)
        assert refused.status_code == 400 and said in refused.text
    key = "R0123456789"
    made = send(owner, "/webhooks", act="add", url=url, format="pagerduty", routing_key=key)
    assert made.status_code == 200 and key not in made.text
    page = owner.get("/dashboard/webhooks").text
    assert "PagerDuty (Events API v2)</td>" in page and key not in page
    removed = send(owner, "/webhooks", act="remove", endpoint=field(page, "endpoint"), confirm=url)
    assert "was removed" in removed.text


def test_an_endpoint_is_added_tested_and_removed_by_name(
    owner: httpx.Client, deployment: Deployment
) -> None:
    url = "https://hooks.example/tollhouse"
    made = send(owner, "/webhooks", act="add", url=url, events="invoice")
    secret = re.search(r'id="once">(whsec_[^<]+)<', made.text)
    assert secret is not None and url in made.text
    page = owner.get("/dashboard/webhooks").text
    assert "whsec_" not in page and "invoice.final" in page
    endpoint = field(page, "endpoint")
    tested = send(owner, "/webhooks", act="test", endpoint=endpoint).text
    assert "webhook.test" in tested and "pending" in tested
    assert send(owner, "/webhooks", act="remove", endpoint=endpoint, confirm="x").status_code == 400
    with closing(browser(deployment, with_role(deployment, "viewer"))) as viewer:
        assert (
            send(viewer, "/webhooks", act="remove", endpoint=endpoint, confirm=url).status_code
            == 403
        )
    removed = send(owner, "/webhooks", act="remove", endpoint=endpoint, confirm=url).text
    assert "The endpoint was removed." in removed and "No endpoints." in removed
    assert "webhook.add" in owner.get("/dashboard/team").text


def test_an_export_is_scheduled_paused_and_deleted_by_name(
    owner: httpx.Client, operator: httpx.Client, deployment: Deployment
) -> None:
    terms = {"what": "usage", "form": "csv", "every": "day", "delay_hours": "2"}
    away = send(owner, "/exports", act="create", **terms, destination="../../etc")
    assert away.status_code == 400
    made = send(owner, "/exports", act="create", **terms, destination="books").text
    assert f"tenants/{deployment.tenant_id}/books" in made
    schedule = field(made, "schedule")
    assert "paused" in send(owner, "/exports", act="pause", schedule=schedule).text
    assert (
        "The schedule is active again"
        in send(owner, "/exports", act="resume", schedule=schedule).text
    )
    assert send(owner, "/exports", act="end", schedule=schedule, confirm="x").status_code == 400
    ended = send(owner, "/exports", act="end", schedule=schedule, confirm="usage, csv").text
    assert (
        "The schedule was deleted." in ended
        and "export_schedule.end" in owner.get("/dashboard/team").text
    )
    bad = send(owner, "/exports", act="create", destination="x", **{**terms, "delay_hours": "soon"})
    assert bad.status_code == 400
    own = send(operator, "/exports", act="create", **terms, destination="finance/books").text
    assert "finance/books" in own


def test_a_schedule_of_focus_has_a_version_that_is_changed(
    owner: httpx.Client, deployment: Deployment
) -> None:
    terms = {"what": "focus", "form": "csv", "every": "day", "delay_hours": "2"}
    made = send(
        owner, "/exports", act="create", **terms, destination="focus", focus_version="1.2"
    ).text
    before, _, own = made.partition("focus, csv, 1.2 cost-and-usage")
    assert own, before
    schedule = field(own, "schedule")
    again = {"act": "change", "schedule": schedule, "dataset": "invoice-detail"}
    assert send(owner, "/exports", **again, focus_version="1.2").status_code == 400
    changed = send(owner, "/exports", **again, focus_version="1.4").text
    assert "focus, csv, 1.4 invoice-detail" in changed
    assert "The schedule writes this FOCUS dataset from its next file on." in changed
    head = owner.get("/dashboard/exports/file?what=focus&focus_version=1.3&columns=SkuId").text
    assert head.splitlines()[0] == "SkuId"


def test_a_card_is_left_on_the_provider_s_page(owner: httpx.Client, deployment: Deployment) -> None:
    by_hand = owner.get("/dashboard/payment-methods").text
    assert "recorded by the operator" in by_hand and "Add a card or account" not in by_hand
    refused = send(owner, "/payment-methods", act="add")
    assert refused.status_code == 409 and "by hand" in refused.text
    services, by_people = deployment.services, deployment.services.payments
    services.card_pages.payments = provider = FakePayments(services.clock)
    try:
        asked = send(owner, "/payment-methods", act="add")
        link = f'href="https://pay.invalid/customer-{deployment.tenant_id}?return='
        assert asked.request.method == "GET" and asked.history[0].status_code == 303
        assert asked.text.count("https://pay.invalid/") == 1 and link in asked.text
        portal = send(owner, "/payment-methods", act="portal")
        assert "https://pay.invalid/portal/" in portal.text
        customer = f"customer-{deployment.tenant_id}"
        transfer = {"transfer": "show"}
        off = owner.get("/dashboard/payment-methods", params=transfer)
        assert off.status_code == 409 and "not enabled" in off.text
        with services.database.transaction() as session:
            account = ensure_account(session, deployment.tenant_id, services.clock.now())
            account.payment_methods = ["customer_balance"]
        shown = owner.get("/dashboard/payment-methods", params=transfer).text
        assert "Account for bank transfers" in shown and f"fake-{customer}" in shown
        api = {"headers": deployment.headers}
        path = f"{deployment.url}/admin/v1/payment-methods"
        assert httpx.post(f"{path}/portal", **api).json()["url"].startswith("https://pay.invalid/")
        details = httpx.get(f"{path}/bank-transfer", **api).json()["details"]
        assert details == [{"name": "Account", "value": f"fake-{customer}"}]
        assert "https://pay.invalid/" not in owner.get(str(asked.url)).text
        provider.leave_card(customer)
        with services.database.transaction() as session:
            methods = provider.methods(customer, newest=True)
            posting.customer(session, "fake", customer, methods, services.clock.now())
        page = owner.get("/dashboard/payment-methods").text
        assert "Fake 4242" in page and ">default<" in page and "by fake" in page
        with closing(browser(deployment, with_role(deployment, "developer"))) as developer:
            assert developer.get("/dashboard/payment-methods").status_code == 403
            assert send(developer, "/payment-methods", act="add").status_code == 403
    finally:
        services.card_pages.payments = by_people


def test_a_price_is_tried_before_it_is_saved(operator: httpx.Client) -> None:
    terms = {"model": MODEL, "currency": "USD", "input": "0.2", "cached_input": "0.1"}
    refused = send(operator, "/operator/prices", act="save", **terms, output="cheap")
    assert refused.status_code == 400
    saved = send(operator, "/operator/prices", act="save", **terms, output="0.8", note="spring")
    assert "saved" in saved.text and "spring" in saved.text and "ended" in saved.text


def test_a_dead_letter_is_listed_and_played_again(
    deployment: Deployment, operator: httpx.Client
) -> None:
    services = deployment.services
    task = TASKS["billing.expire_credit"]
    keeper(services.database, services.clock)(task, {}, ValueError("the disk was full"), 9)
    page = operator.get("/dashboard/operator/dead-letters").text
    assert "the disk was full" in page and "billing.expire_credit" in page
    assert send(operator, "/operator/dead-letters", act="replay").status_code == 400
    played = send(operator, "/operator/dead-letters", act="replay", id=field(page, "id"))
    assert "No dead letters" in played.text


def test_an_act_that_a_form_does_not_name_is_told(owner: httpx.Client) -> None:
    assert send(owner, "/team", act="explode").status_code == 400


def test_a_tenant_s_forms_cannot_reach_another_tenant(
    deployment: Deployment, owner: httpx.Client
) -> None:
    services = deployment.services
    with services.database.read() as session:
        own = {key.id for key in all_of(session, scope_of_operator(deployment.tenant_id))}
    assert own
    for path, fields in (
        ("/team", {"act": "remove", "member": "mem_foreign", "confirm": "x"}),
        ("/limits", {"act": "end", "budget": "bud_foreign", "confirm": "x"}),
        ("/webhooks", {"act": "resend", "message": "1"}),
        ("/webhooks", {"act": "remove", "endpoint": "hook_foreign", "confirm": "x"}),
        ("/exports", {"act": "end", "schedule": "sched_foreign", "confirm": "x"}),
        ("/safety", {"act": "appeal", "request": "req_foreign", "reason": "x"}),
    ):
        assert send(owner, path, **fields).status_code == 404, path


@pytest.mark.parametrize("what", ["usage", "charges", "invoices", "ledger", "focus"])
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_every_export_is_taken_from_the_page(owner: httpx.Client, what: str, form: str) -> None:
    answer = owner.get(f"/dashboard/exports/file?what={what}&form={form}")
    assert answer.status_code == 200
    assert f".{form}" in answer.headers["content-disposition"]


def test_a_page_of_another_tenant_s_request_or_invoice_is_not_found(
    deployment: Deployment, operator: httpx.Client
) -> None:
    """A second tenant's owner asks for what the first one has."""
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(
        f"{deployment.url}/v1/chat/completions", json=body, headers=deployment.headers, timeout=60
    )
    deployment.last_event()
    made = send(operator, "/operator/tenants", act="create", name="stranger")
    stranger_id = made.url.path.rpartition("/")[2]
    with closing(browser(deployment, with_role(deployment, "owner", stranger_id))) as stranger:
        request_id = answer.headers["x-request-id"]
        assert stranger.get(f"/dashboard/requests/{request_id}").status_code == 404
        assert request_id not in stranger.get("/dashboard/requests").text
        assert stranger.get("/dashboard/invoices/inv_foreign/lines/1").status_code == 404
        assert "No requests match" in stranger.get("/dashboard/requests").text


def test_a_key_that_was_rotated_is_revoked_on_its_page_and_its_limit_shows_its_name(
    deployment: Deployment, owner: httpx.Client
) -> None:
    services, scope = deployment.services, scope_of_operator(deployment.tenant_id)
    with services.database.transaction() as session:
        project = projects(session, scope)[0].id
        made = issue(session, scope, services.clock, project_id=project, name="turned")
        rule = LimitRule(Scope.KEY, Unit.REQUESTS, 1_000_000, target=made.id)
        set_rule(session, scope, services.clock, rule)
        rotate(session, scope, services.clock, made.id, overlap=timedelta(hours=24))
    page = owner.get("/dashboard/limits").text
    assert "key turned" in page and made.id not in re.sub(r'value="[^"]*"', "", page)
    page = owner.get("/dashboard/keys").text
    form = page[page.index(f'value="{made.id}"') - 400 :][:800]
    assert 'value="revoke"' in form and 'value="rotate"' not in form
    act = {"act": "revoke", "key_id": made.id, "confirm": "turned"}
    assert "was revoked" in owner.post("/dashboard/keys", data=act).text
    with services.database.read() as session:
        assert not is_live(session.get_one(ApiKey, made.id), services.clock.now())
