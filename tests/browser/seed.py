"""Six weeks of a busy deployment: tenants, models, adapters, keys, money, safety. The same every time."""

import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import pi, sin

from sqlalchemy import select

from billing.accounts.accounts import ensure_account
from billing.audit import reconcile
from billing.invoicing import open_amounts
from billing.invoicing.invoice_run import run
from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.notices import budgets
from billing.payments import settlement
from billing.pricing import prices
from billing.usage import service_rollups, usage
from billing.usage.tables import UsageEventRow
from core.dead_letters import keeper
from core.events import ModerationEvent, UsageEvent, UsageKind
from core.ids import new_id
from core.money import Money, units_of
from core.queue import TASKS
from core.tenants import adapters, keys, members, organisations, rejections
from core.tenants.models import Project
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.serving.services import Services
from moderation import appeals
from moderation.records import store

DAYS = 45
MODELS = {"tiny": 5, "llama-3.1-8b": 3, "qwen-2.5-32b": 2}
PRICES = {
    "tiny": ("0.15", "0.075", "0.60"),
    "llama-3.1-8b": ("0.60", "0.30", "2.40"),
    "qwen-2.5-32b": ("2.20", "0.90", "7.50"),
}
ADAPTERS = ("support-tone", "contract-summary", "sql-writer")
KEYS = ("checkout", "support-agent", "nightly-reports", "search")
OTHERS = ("harbour-freight", "north-clinic", "quill-books")
CATEGORIES = (("harassment",), ("prompt_attack",), ("violence", "illicit"), ("email",))


@dataclass
class Seeder:
    services: Services
    tenant_id: str
    chance: random.Random

    @property
    def now(self) -> datetime:
        return self.services.clock.now()

    @property
    def scope(self) -> TenantScope:
        return scope_of_operator(self.tenant_id)


def fill(services: Services, tenant_id: str) -> None:
    seeder = Seeder(services, tenant_id, random.Random(7))
    versions = _prices(seeder)
    people = _people(seeder)
    made = _keys(seeder, tenant_id)
    _adapters(seeder)
    _usage(seeder, tenant_id, made, people, versions, 60)
    for name in OTHERS:
        other = _tenant(seeder, name)
        _usage(seeder, other, _keys(seeder, other), [], versions, 12)
    _credit(seeder)
    run(services.database, services.clock)
    service_rollups.sum_all(services.database, services.clock)
    _payments(seeder)
    _safety(seeder)
    _operator_data(seeder)


def _prices(seeder: Seeder) -> dict[str, str]:
    services = seeder.services
    since = seeder.now - timedelta(days=DAYS + 30)
    found = {}
    with services.database.transaction() as session:
        for model, (asked, cached, answered) in PRICES.items():
            if model == "tiny":
                found[model] = prices.ensure_default_prices(session, services.clock, model).id
                continue
            terms = {"input": asked, "cached_input": cached, "output": answered}
            draft = prices.PriceDraft(model, terms, since, note="list price")
            found[model] = prices.save(session, services.clock, draft).id
    return found


def _people(seeder: Seeder) -> list[str]:
    clock = seeder.services.clock
    with seeder.services.database.transaction() as session:
        return [
            members.add(
                session,
                seeder.scope,
                clock,
                email=f"{role}@demo.example",
                role=role,
                name=role.title(),
            ).id
            for role in ("owner", "finance", "developer", "viewer")
        ]


def _tenant(seeder: Seeder, name: str) -> str:
    clock = seeder.services.clock
    with seeder.services.database.transaction() as session:
        made = organisations.create_tenant(session, clock, name=name, plan="premium")
        organisations.create_project(session, scope_of_operator(made.id), clock, name="default")
        return made.id


def _keys(seeder: Seeder, tenant_id: str) -> list[tuple[str, str]]:
    """(project, key) pairs."""
    services, scope = seeder.services, scope_of_operator(tenant_id)
    with services.database.transaction() as session:
        ensure_account(session, tenant_id, seeder.now)
        project = session.scalars(select(Project.id).where(Project.tenant_id == tenant_id)).first()
        second = organisations.create_project(session, scope, services.clock, name="research").id
        assert project is not None
        places = [project, project, second, second]
        return [
            (place, keys.issue(session, scope, services.clock, project_id=place, name=name).id)
            for place, name in zip(places, KEYS, strict=True)
        ]


def _adapters(seeder: Seeder) -> None:
    with seeder.services.database.transaction() as session:
        for number, name in enumerate(ADAPTERS):
            adapters.register(
                session,
                seeder.scope,
                seeder.services.clock,
                name=name,
                base_model="tiny",
                digest=f"{number + 1}a" * 32,
                path=f"adapters/{name}",
                rank=8 * (number + 1),
                bytes=9_400_000 * (number + 1),
            )


def _usage(
    seeder: Seeder,
    tenant_id: str,
    made: list[tuple[str, str]],
    people: list[str],
    versions: dict[str, str],
    a_day: int,
) -> None:
    chance = seeder.chance
    events = []
    for back in range(DAYS):
        day = seeder.now - timedelta(days=DAYS - back)
        weekly = 1 + 0.35 * sin(2 * pi * back / 7)
        count = round(a_day * weekly * (0.6 + back / DAYS))
        events += [event_of(seeder, tenant_id, made, people, versions, day) for _ in range(count)]
    chance.shuffle(events)
    for first in range(0, len(events), 1_000):
        with seeder.services.database.transaction() as session:
            usage.record(session, events[first : first + 1_000], seeder.services.clock)


def event_of(
    seeder: Seeder,
    tenant_id: str,
    made: list[tuple[str, str]],
    people: list[str],
    versions: dict[str, str],
    day: datetime,
) -> UsageEvent:
    chance = seeder.chance
    model = chance.choices(list(MODELS), list(MODELS.values()))[0]
    project, key = chance.choice(made)
    at = min(day + timedelta(seconds=chance.randrange(86_400)), seeder.now - timedelta(minutes=1))
    asked = chance.randrange(8_000, 240_000)
    answered = chance.randrange(2_000, 60_000)
    first = round(chance.lognormvariate(4.9, 0.5))
    duration = first + round(1000 * answered / chance.uniform(40, 160))
    status = chance.choices([200, 500, 400], [985, 5, 10])[0]
    cached = asked * chance.choice([0, 0, 1, 3, 6]) // 8
    return UsageEvent(
        request_id=new_id("req", int(at.timestamp() * 1000)),
        tenant_id=tenant_id,
        project_id=project,
        key_id=key,
        kind=UsageKind.GENERATION,
        route="/v1/chat/completions",
        model=model,
        adapter=chance.choice([None, *ADAPTERS]) if model == "tiny" else None,
        adapter_digest=None,
        price_version=versions[model],
        occurred_at=at,
        finished_at=at + timedelta(milliseconds=duration),
        input_tokens=asked,
        cached_tokens=cached,
        output_tokens=answered if status == 200 else 0,
        waived_tokens=chance.choice([0, 0, 0, 120]),
        finish_reason="stop" if status == 200 else "error",
        status=status,
        streamed=True,
        first_token_ms=first if status == 200 else None,
        duration_ms=duration,
        queue_ms=chance.choice([0, 0, 0, 40, 250]),
        engine_id=chance.choice(["gpu-a", "gpu-b"]),
        member_id=chance.choice([None, *people]) if people else None,
        prompt_order="safe",
        reordered_cached_tokens=cached // 3,
    )


def _credit(seeder: Seeder) -> None:
    services = seeder.services
    with services.database.transaction() as session:
        for kind, amount in (("prepaid", "900"), ("promo", "25")):
            credits.grant(
                session,
                tenant_id=seeder.tenant_id,
                kind=kind,
                money=Money(units_of(amount), "USD"),
                reference=f"seed:{kind}",
                at=seeder.now,
            )
        budgets.create(
            session,
            services.clock,
            tenant_id=seeder.tenant_id,
            scope="tenant",
            scope_id=seeder.tenant_id,
            cap=Money(units_of("400"), "USD"),
            name="Whole organisation",
            emails=("finance@demo.example",),
        )
        hour = seeder.now.replace(minute=0, second=0, microsecond=0)
        rejections.add(
            session,
            [
                rejections.RejectionCount(seeder.tenant_id, hour, "tenant:requests:60", 41, 0, 0),
                rejections.RejectionCount(seeder.tenant_id, hour, "queue", 0, 18, 4_300),
            ],
        )


def _payments(seeder: Seeder) -> None:
    """All but one invoice are paid."""
    services = seeder.services
    with services.database.transaction() as session:
        final = session.scalars(select(Invoice).where(Invoice.status == "final")).all()
        for invoice in final[:-1]:
            payment = settlement.begin_payment(
                session,
                tenant_id=invoice.tenant_id,
                invoice_id=invoice.id,
                amount_minor=open_amounts.open_minor(invoice),
                currency=invoice.currency,
                provider="manual",
                reference=f"seed:{invoice.id}",
                at=seeder.now,
            )
            settlement.succeed(session, payment, seeder.now)


def _safety(seeder: Seeder) -> None:
    chance, services = seeder.chance, seeder.services
    events = []
    with services.database.read() as session:
        own = select(UsageEventRow.request_id).where(UsageEventRow.tenant_id == seeder.tenant_id)
        served = session.scalars(own.order_by(UsageEventRow.request_id).limit(160)).all()
    for request_id in served:
        categories = chance.choice(CATEGORIES)
        action = chance.choices(["annotate", "redact", "block"], [6, 2, 2])[0]
        at = seeder.now - timedelta(hours=chance.randrange(1, 24 * 20))
        events.append(
            ModerationEvent(
                request_id=request_id,
                tenant_id=seeder.tenant_id,
                project_id="proj_seed",
                key_id="key_seed",
                at=at,
                direction=chance.choice(["input", "output"]),
                action=action,
                policy_version="pol_default",
                text_sha256="0" * 64,
                categories=categories,
                scores={name: round(chance.uniform(0.5, 0.99), 2) for name in categories},
                spans=(),
                view="plain",
                unscanned=False,
            )
        )
    with services.database.transaction() as session:
        store(session, sorted(events, key=lambda each: each.at))
        for each in (e for e in events[:6] if e.direction == "input"):
            appeals.open_appeal(
                session, seeder.scope, services.clock, each.request_id, "A quotation in a review."
            )


def _operator_data(seeder: Seeder) -> None:
    services = seeder.services
    reconcile.audit_and_store(services.database, services.clock)
    error = TimeoutError("the payment provider did not answer")
    keeper(services.database, services.clock)(TASKS["billing.top_up"], {}, error, 9)
