"""Sends the workload's requests and tallies the responses of each tenant."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
from sqlalchemy import select

from billing.accounts.accounts import ensure_accounts
from core.clock import Clock
from core.database import Database
from core.tenants import keys, organisations
from core.tenants.bootstrap import NAME as DEMO
from core.tenants.models import Project, Tenant
from core.tenants.scope import scope_of_operator
from engine.demo.paths import PROMPTS
from gateway.prompts.rendering import NO_CHAT_TEMPLATE

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


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class Tally:
    """Counts from the responses to one tenant."""

    answered: int = 0
    limited: int = 0
    blocked: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    request_ids: set[str] = field(default_factory=set)


ProgressCallback = Callable[[dict[str, Tally]], None]


async def send(
    url: str,
    model: str,
    workload: Workload,
    keys: dict[str, str],
    seconds: float,
    on_progress: ProgressCallback,
) -> dict[str, Tally]:
    """Send requests for `seconds`. `on_progress` is called once a second with the tallies so far."""
    tallies = {part.tenant: Tally() for part in workload.parts}
    timeout = aiohttp.ClientTimeout(total=seconds + 180)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        sender, stopped = _Sender(http, url, model), asyncio.Event()
        workers = [
            asyncio.create_task(
                sender.send_until(stopped, part, keys[part.tenant], tallies[part.tenant])
            )
            for part in workload.parts
            for _ in range(part.concurrency)
        ]
        first = workload.parts[0]
        await sender.send(workload.blocked, keys[first.tenant], tallies[first.tenant])
        for _ in range(max(1, round(seconds))):
            await asyncio.sleep(min(1.0, seconds))
            on_progress(tallies)
        stopped.set()
        await asyncio.gather(*workers)
    return tallies


@dataclass(slots=True)
class _Sender:
    http: aiohttp.ClientSession
    url: str
    model: str
    route: str = _CHAT  # a model without a chat template has only completions

    async def send_until(
        self, stopped: asyncio.Event, part: TenantTraffic, key: str, tally: Tally
    ) -> None:
        for body in part.bodies():
            if stopped.is_set():
                return
            wait_s = await self.send(body, key, tally)
            try:
                async with asyncio.timeout(max(wait_s, part.pause_s)):
                    await stopped.wait()
            except TimeoutError:
                continue

    async def send(self, body: Body, key: str, tally: Tally) -> float:
        """Send one request. Returns the seconds to wait before the next."""
        adapter = body.get("adapter")
        payload = {name: value for name, value in body.items() if name != "adapter"}
        payload["model"] = f"{self.model}:{adapter}" if adapter else self.model
        if self.route == _COMPLETIONS:
            payload = as_completion(payload)
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with self.http.post(
                f"{self.url}{self.route}", json=payload, headers=headers
            ) as answer:
                content = await answer.json()
                if answer.status == 200:
                    _count(tally, answer.headers["x-request-id"], content)
                    return 0.0
                if answer.status == 429:
                    tally.limited += 1
                    return float(answer.headers.get("retry-after-ms", "1000")) / 1000
                if content["error"]["code"] == NO_CHAT_TEMPLATE:
                    self.route = _COMPLETIONS
                    return await self.send(body, key, tally)
                if content["error"]["code"] == "content_filter":
                    tally.blocked += 1
                else:
                    tally.failed += 1
                return 1.0
        except (aiohttp.ClientError, TimeoutError):
            tally.failed += 1
            return 1.0


def _count(tally: Tally, request_id: str, content: Body) -> None:
    usage = content["usage"]
    tally.answered += 1
    tally.blocked += any(c["finish_reason"] == "content_filter" for c in content["choices"])
    tally.input_tokens += usage["prompt_tokens"]
    tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    tally.output_tokens += usage["completion_tokens"]
    tally.request_ids.add(request_id)
