"""A tenant with one object of every kind that another tenant might name."""

import json
import zlib
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy import MetaData, Table, inspect, select

from core.clock import SystemClock
from core.database import Database
from core.tenants import adapters, keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.roles import MEMBER_ROLES
from core.tenants.scope import scope_of_operator
from gateway.serving.services import Services
from tests.dashboards.billed import bill_a_fee, whole_invoice
from tests.gateway.deployment import MODEL, Deployment

WORD = "heliotrope"  # in every text of the owner's
MESSAGES = [{"role": "user", "content": f"Say {WORD}."}]


@dataclass(frozen=True)
class Firm:
    id: str
    name: str
    project_id: str
    keys: dict[str, str]  # role -> secret


def firm(services: Services, name: str) -> Firm:
    clock = SystemClock()
    with services.database.transaction() as session:
        tenant = create_tenant(session, clock, name=name, plan="premium")
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, clock, name="default").id
        secrets = {
            role: keys.issue(session, scope, clock, project_id=project, name=role, role=role).secret
            for role in MEMBER_ROLES
        }
    return Firm(tenant.id, name, project, secrets)


def make_objects(deployment: Deployment, client: httpx.Client, owner: Firm) -> dict[str, str]:
    """The owner's object for every parameter of a path; `PREFIX name` is one for paths below a prefix."""

    def post(path: str, body: Any, **options: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {owner.keys['owner']}"}
        answer = client.post(path, headers=headers, json=body, **options)
        assert answer.status_code < 300, (path, answer.text)
        return dict(answer.json())

    services = deployment.services
    with services.database.transaction() as session:
        adapters.register(
            session,
            scope_of_operator(owner.id),
            SystemClock(),
            name=f"{WORD}-adapter",
            base_model=MODEL,
            digest="a" * 64,
            path="nowhere",
            rank=4,
            bytes=1,
        )
    services.adapters.refresh()
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}  # type: ignore[assignment]
    uploaded = client.post(
        "/v1/files",
        headers={"authorization": f"Bearer {owner.keys['owner']}"},
        files={"file": (f"{WORD}.jsonl", json.dumps(line).encode())},
        data={"purpose": "batch"},
    ).json()
    batch = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    message = {"model": MODEL, "max_tokens": 1, "messages": MESSAGES}
    stored = {"model": MODEL, "max_tokens": 1, "messages": MESSAGES, "store": True}
    talk = post("/v1/conversations", {"items": [{**MESSAGES[0], "type": "message"}]})
    items = client.get(
        f"/v1/conversations/{talk['id']}/items",
        headers={"authorization": f"Bearer {owner.keys['owner']}"},
    ).json()["data"]
    answered = {"model": MODEL, "input": f"Say {WORD}.", "max_output_tokens": 16, "store": True}
    member = {"email": f"{WORD}@example.com", "role": "viewer", "password": "a long password 1"}
    project = post("/v1/organization/projects", {"name": WORD})["id"]
    below = "/v1/organization/projects/"
    made = {
        f"{below} project_id": project,
        f"{below} key_id": post("/admin/v1/keys", {"project_id": project, "name": "x"})["id"],
        "account_id": post(f"{below}{project}/service_accounts", {"name": WORD})["id"],
        "user_id": post("/admin/v1/members", {**member, "email": f"user@{WORD}.example"})["id"],
        "invite_id": post(
            "/v1/organization/invites", {"email": f"guest@{WORD}.example", "role": "reader"}
        )["id"],
        "/v1/organization/admin_api_keys/ key_id": post(
            "/v1/organization/admin_api_keys", {"name": WORD}
        )["id"],
        "model": f"{WORD}-adapter",
        "name": f"{WORD}-adapter",
        "digest": "a" * 64,
        "response_id": post("/v1/responses", answered)["id"],
        "conversation_id": talk["id"],
        "item_id": items[0]["id"],
        "completion_id": post("/v1/chat/completions", stored)["id"],
        "file_id": uploaded["id"],
        "batch_id": post("/v1/batches", {"input_file_id": uploaded["id"], **batch})["id"],
        "/v1/messages/ batch_id": post(
            "/v1/messages/batches", {"requests": [{"custom_id": "1", "params": message}]}
        )["id"],
        "tenant": owner.name,
        "project_id": owner.project_id,
        "member_id": post("/admin/v1/members", member)["id"],
        "key_id": post("/admin/v1/keys", {"project_id": owner.project_id, "name": WORD})["id"],
        "budget_id": post("/admin/v1/budgets", {"cap": "5", "name": WORD})["id"],
        "prompt_id": post("/admin/v1/prompts", {"name": f"{WORD}-prompt", "messages": MESSAGES})[
            "id"
        ],
        "schedule_id": post(
            "/admin/v1/export-schedules",
            {"what": "usage", "destination": "books"},
        )["id"],
    }
    billed = Deployment(
        services, deployment.engine, "", "", owner.id, deployment.loop, deployment.app
    )
    bill_a_fee(billed)
    return made | {"reference": whole_invoice(billed).id}


# What background tasks compute from the other rows.
COMPUTED = (
    "_hourly",
    "_daily",
    "charges",
    "ledger_accounts",
    "ledger_transactions",
    "limit_rejections",
)


def rows_of(database: Database, tenant_id: str) -> dict[str, int]:
    """A checksum of the tenant's rows in each table that names tenants, without sums by hour or day:
    a background task computes them from the others, and writes when a key was used last."""
    sums: dict[str, int] = {}
    with database.read() as session:
        connection = session.connection()
        for name in inspect(connection).get_table_names():
            table = Table(name, MetaData(), autoload_with=connection, resolve_fks=False)
            column = "id" if name == "tenants" else "tenant_id"
            if column in table.c and not name.endswith(COMPUTED):
                columns = [each for each in table.c if each.name != "last_used_at"]
                rows = session.execute(select(*columns).where(table.c[column] == tenant_id))
                sums[name] = sum(zlib.crc32(repr(tuple(row)).encode()) for row in rows)
    return sums


def example(schema: dict[str, Any], parts: dict[str, Any], name: str = "") -> Any:
    """A small value of the schema: what is required, and of that the first choice."""
    if "$ref" in schema:
        return example(parts[schema["$ref"].rpartition("/")[2]], parts, name)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return example(schema[key][0], parts, name)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        fields = schema.get("properties", {})
        return {each: example(fields[each], parts, each) for each in schema.get("required", ())}
    if kind == "array":
        return [example(schema.get("items", {}), parts, name)] if schema.get("minItems") else []
    if kind == "string":
        return "2026-01-01T00:00:00Z" if schema.get("format") == "date-time" else f"{name or 'x'}"
    return {"integer": 1, "number": 1, "boolean": True}.get(kind)
