"""The demo's workload: tenants with a key each, their requests, and their request rates."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from sqlalchemy import select

from billing.accounts.accounts import ensure_accounts
from core.clock import Clock
from core.database import Database
from core.tenants import keys, organisations
from core.tenants.bootstrap import NAME as DEMO
from core.tenants.models import Project, Tenant
from core.tenants.scope import scope_of_operator
from engine.demo.paths import PROMPTS

Body = dict[str, Any]
# Short, for a model may have a context of a few hundred tokens; the system prompt is a prefix that
# requests of a tenant share.
_SYSTEM = (
    "You answer for {name}. Be brief and friendly. Use plain words. Say so when you do not know."
)
_QUESTIONS = [
    "Write a greeting for a new customer.",
    "Name three colours.",
    "Why is the sky blue?",
    "Give one tip for a good night's sleep.",
]


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """The traffic of one tenant."""

    tenant: str
    bodies: Callable[[], Iterator[Body]]  # request bodies without `model`
    concurrency: int  # concurrent requests
    pause_s: float = 0.2  # between a response and the next request


@dataclass(frozen=True, slots=True)
class Workload:
    parts: tuple[TenantTraffic, ...]
    blocked: Body  # a request that moderation blocks; the first tenant sends it once


def load_workload() -> Workload:
    """For the demo model, which answers questions about Tollhouse."""
    prompts = json.loads(PROMPTS.read_text())
    parts = [
        TenantTraffic(each["name"], _plain_bodies(each["questions"], each["system"]), 1)
        for each in prompts["tenants"]
    ]
    parts.append(TenantTraffic(DEMO, _adapter_bodies(prompts["adapters"]), 2))
    noisy = prompts["noisy_neighbour"]
    parts.append(
        TenantTraffic(noisy["name"], _plain_bodies(noisy["questions"], noisy["system"]), 8, 0.0)
    )
    return Workload(tuple(parts), _body(prompts["blocked"]))


def general_script(adapters: list[str]) -> Workload:
    """For any other model: everyday questions, and each of the demo tenant's adapters in turn."""
    prompts = json.loads(PROMPTS.read_text())
    parts = [
        TenantTraffic(each["name"], _plain_bodies(_QUESTIONS, _SYSTEM.format(name=each["name"])), 1)
        for each in prompts["tenants"]
    ]
    questions_by_adapter = dict.fromkeys(["", *adapters], _QUESTIONS)
    parts.append(TenantTraffic(DEMO, _adapter_bodies(questions_by_adapter), 2))
    noisy = prompts["noisy_neighbour"]["name"]
    parts.append(
        TenantTraffic(noisy, _plain_bodies(_QUESTIONS, _SYSTEM.format(name=noisy)), 8, 0.0)
    )
    return Workload(tuple(parts), _body(prompts["blocked"]))


def issue_keys(database: Database, clock: Clock, tenants: list[str]) -> dict[str, str]:
    """Issue a key for each tenant, by name. Missing tenants are created; the noisy one is on `free`."""
    secrets: dict[str, str] = {}
    with database.transaction() as session:
        for name in tenants:
            tenant = session.scalar(select(Tenant).where(Tenant.name == name))
            if tenant is None:
                plan = "free" if name.endswith("-batch") else "standard"
                tenant = organisations.create_tenant(
                    session, clock, name=name, display_name=name, plan=plan
                )
            scope = scope_of_operator(tenant.id, "demo")
            project = session.scalar(select(Project).where(Project.tenant_id == tenant.id).limit(1))
            if project is None:
                project = organisations.create_project(session, scope, clock, name="default")
            ensure_accounts(session, [tenant.id], clock.now())
            issued = keys.issue(session, scope, clock, project_id=project.id, name="demo traffic")
            secrets[name] = issued.secret
    return secrets


def _plain_bodies(questions: list[str], system: str) -> Callable[[], Iterator[Body]]:
    def _bodies() -> Iterator[Body]:
        for number in count():
            yield _body(questions[number % len(questions)], system)

    return _bodies


def _adapter_bodies(questions_by_adapter: dict[str, list[str]]) -> Callable[[], Iterator[Body]]:
    def _bodies() -> Iterator[Body]:
        for number in count():
            for adapter, questions in questions_by_adapter.items():
                yield _body(questions[number % len(questions)]) | {"adapter": adapter}

    return _bodies


def _body(question: str, system: str = "") -> Body:
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": question}], "max_tokens": 60}


def as_completion(body: Body) -> Body:
    """The same request for `/v1/completions`."""
    texts = [message["content"] for message in body["messages"]]
    rest = {name: value for name, value in body.items() if name != "messages"}
    return {**rest, "prompt": "\n\n".join(texts)}
