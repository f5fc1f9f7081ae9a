"""What the commands share: settings and database, options, output."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from billing.archive.opening import open_database
from billing.payments import provider_snapshot
from billing.payments.base import PaymentProvider, Window
from core.clock import Clock, SystemClock
from core.data_dir import private_files
from core.database import Database
from core.errors import BadRequest, NotFound
from core.money import units_of
from core.settings import Settings, load_settings
from core.tenants import organisations
from core.tenants.models import Tenant
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.edge.decoding import parse_datetime


@dataclass(frozen=True, slots=True)
class CommandContext:
    settings: Settings
    clock: Clock
    database: Database


@contextmanager
def command_context() -> Iterator[CommandContext]:
    """Raises DependencyDown when the database does not answer, SettingError when it has no schema."""
    settings = load_settings()
    with private_files():
        database = open_database(settings)
        try:
            database.ping()
            yield CommandContext(settings, SystemClock(), database)
        except DBAPIError as error:
            explained = database.explained(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            database.close()


ACTOR = "command line"
PASSWORD_SOURCE = "a file with the password, or - to read a line from stdin"


def add_tenant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="demo", help="name or id (default: demo)")


def scope_named(session: Session, tenant: str) -> TenantScope:
    """The scope of a tenant, with the operator's rights: a user of this machine is the operator."""
    return scope_of_operator(organisations.tenant_named(session, tenant).id, ACTOR)


def project_named(session: Session, scope: TenantScope, name: str) -> str:
    for project in organisations.projects(session, scope):
        if name in (project.id, project.name):
            return project.id
    raise BadRequest(
        f"There is no project {name!r}.",
        next_step="List projects with `tollhouse tenant projects`, or add one with "
        "`tollhouse tenant project-add`.",
    )


def password_from(source: str | None) -> str | None:
    """Read a password from stdin (`-`, one line) or a file, since `ps` would show an argument."""
    if source is None:
        return None
    text = sys.stdin.readline() if source == "-" else Path(source).read_text()
    return text.rstrip("\r\n")


def tenant_id_of(session: Session, name_or_id: str) -> str:
    tenant_id = session.scalar(
        select(Tenant.id).where(or_(Tenant.name == name_or_id, Tenant.id == name_or_id))
    )
    if tenant_id is None:
        raise NotFound(
            f"There is no tenant {name_or_id!r}.",
            next_step="List tenants with `tollhouse tenant list`.",
        )
    return tenant_id


def units_of_amount(amount: str) -> int:
    """Picounits of a decimal `--amount` in major units."""
    try:
        return units_of(amount)
    except ValueError as error:
        raise BadRequest(f"--amount: {error}.") from None


def text_of(name: str) -> str:
    """The text of a file; `-` is stdin."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, ValueError) as error:
        raise BadRequest(f"{name} cannot be read: {error}.") from None


def add_provider_window(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="since",
        help="first day of the payment provider's records to compare, besides our open items; "
        f"default: {provider_snapshot.DEFAULT_DAYS} days ago",
    )
    parser.add_argument("--to", dest="until", help="day after the last; default: tomorrow")


def fetched_from_provider(
    tools: CommandContext, provider: PaymentProvider, arguments: argparse.Namespace
) -> provider_snapshot.ProviderSnapshot:
    now = tools.clock.now()
    return provider_snapshot.fetch(
        tools.database, provider, now, window_of(arguments, provider_snapshot.default_window(now))
    )


def window_of(arguments: argparse.Namespace, usual: Window) -> Window:
    """The period of the options. Raises BadRequest if it is empty."""
    window = usual
    if arguments.since:
        window = replace(window, since=parse_datetime(arguments.since, "--from"))
    if arguments.until:
        window = replace(window, until=parse_datetime(arguments.until, "--to"))
    if window.since >= window.until:
        raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
    return window
