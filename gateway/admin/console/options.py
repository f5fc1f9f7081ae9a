"""Helpers shared by the commands for tenants, members, keys, limits and adapters."""

import argparse
import sys
from pathlib import Path

from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.tenants import organisations
from core.tenants.scope import TenantScope, scope_of_operator

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
