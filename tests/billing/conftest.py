"""A billing database with one tenant, one price, and events on demand."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.pricing import prices
from billing.pricing.pricing import PriceVersion
from billing.rating import rating
from billing.usage import usage
from core.clock import FakeClock
from core.database import Database
from core.events import UsageEvent, UsageKind
from core.ids import new_id
from core.tenants.models import Tenant

if TYPE_CHECKING:
    from tests.billing.payments.stripe_deployment import Till

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Deployment:
    database: Database
    clock: FakeClock
    version: PriceVersion
    _made: int = field(default=0)

    def event(self, **changes: Any) -> UsageEvent:
        self._made += 1
        now = self.clock.now()
        plain = UsageEvent(
            request_id=new_id("req"),
            tenant_id="acme",
            project_id="proj",
            key_id="key",
            kind=UsageKind.GENERATION,
            route="/v1/chat/completions",
            model="demo",
            adapter=None,
            adapter_digest=None,
            price_version=self.version.id,
            occurred_at=now,
            finished_at=now + timedelta(seconds=1),
            input_tokens=100,
            cached_tokens=20,
            output_tokens=50,
            waived_tokens=3,
            finish_reason="stop",
            status=200,
        )
        return replace(plain, **changes)

    def record(self, *events: UsageEvent) -> int:
        with self.database.transaction() as session:
            return usage.record(session, events, self.clock)

    def rate(self) -> int:
        with self.database.transaction() as session:
            return rating.rate(session, self.clock).events

    def tenant(self, name: str, **fields: Any) -> None:
        with self.database.transaction() as session:
            now = self.clock.now()
            row = Tenant(id=name, name=name, display_name=name, created_at=now, **fields)
            session.add(row)
            session.flush()
            ensure_account(session, name, now)

    def price(self, written: dict[str, Any], **fields: Any) -> PriceVersion:
        with self.database.transaction() as session:
            draft = prices.PriceDraft(
                fields.pop("model", "demo"),
                written,
                fields.pop("effective_from", self.clock.now()),
                **fields,
            )
            return prices.save(session, self.clock, draft)


def deployment_of(database: Database, clock: FakeClock) -> Deployment:
    with database.transaction() as session:
        version = prices.ensure_default_prices(session, clock, "demo")
    made = Deployment(database, clock, version)
    made.tenant("acme")
    return made


@pytest.fixture
def deployment(database: Database, clock: FakeClock) -> Deployment:
    return deployment_of(database, clock)


@pytest.fixture
def on_each(database: Database, clock: FakeClock) -> Deployment:
    """Where a file's other tests have `deployment` on SQLite."""
    return deployment_of(database, clock)


@pytest.fixture(scope="session")
def template(
    migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PriceVersion]:
    """A file that tests copy: a deployment at the start of their clock."""
    path = tmp_path_factory.mktemp("template") / "tollhouse.db"
    shutil.copy(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}")
    made = deployment_of(database, FakeClock())
    database.close()
    return path, made.version


@pytest.fixture
def lite(
    sqlite_url: str, template: tuple[Path, PriceVersion], clock: FakeClock
) -> Iterator[Deployment]:
    """On SQLite only, where the dialect does not matter to the test."""
    path, version = template
    shutil.copy(path, sqlite_url.removeprefix("sqlite:///"))
    database = Database(sqlite_url)
    yield Deployment(database, clock, version)
    database.close()


@pytest.fixture
def session(lite: Deployment) -> Iterator[Session]:
    with lite.database.transaction() as made:
        yield made


@pytest.fixture
def till(lite: Deployment) -> Iterator["Till"]:
    """One that collects by Stripe."""
    from tests.billing.payments.stripe_deployment import open_till

    with open_till(lite) as made:
        yield made


@pytest.fixture
def both(deployment: Deployment) -> Iterator["Till"]:
    """The same on SQLite and on PostgreSQL."""
    from tests.billing.payments.stripe_deployment import open_till

    with open_till(deployment) as made:
        yield made
