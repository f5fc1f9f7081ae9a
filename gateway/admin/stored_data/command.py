"""`tollhouse tenant export` and `tollhouse tenant erase`."""

import argparse
import os
from pathlib import Path

from core.errors import BadRequest
from core.tenants.operator import operator_token
from gateway.admin.console import CommandContext, add_tenant, command_context, scope_named
from gateway.admin.output import add_json, say, show
from gateway.admin.stored_data.erasing import kept
from gateway.admin.stored_data.stored_data import StoredData
from gateway.metering.spool_watch import wait_until_shipped


def stored_data(tools: CommandContext) -> StoredData:
    token = operator_token(tools.settings)
    return StoredData.of(tools.database, tools.settings, tools.clock, token)


def add_stored_data(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = verbs.add_parser(
        "export", help="write all that is stored of a tenant to a ZIP archive"
    )
    add_tenant(export)
    export.add_argument("--output", required=True, type=Path, metavar="FILE")
    export.set_defaults(run=_export)
    erase = verbs.add_parser(
        "erase", help="erase a closed tenant: all but the books, which the law keeps"
    )
    erase.add_argument("--tenant", required=True, help="name or id")
    erase.add_argument("--confirm", default="", metavar="NAME", help="the tenant's name once more")
    erase.set_defaults(run=_erase)
    for each in (export, erase):
        add_json(each)


def _export(arguments: argparse.Namespace) -> int:
    target: Path = arguments.output
    if target.exists():
        raise BadRequest(f"{target} exists.", next_step="Name another file, or delete it.")
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with command_context() as tools:
        with tools.database.read() as session:
            scope = scope_named(session, arguments.tenant)
        try:
            with part.open("wb") as file:
                counts = stored_data(tools).export(scope, file)
            part.rename(target)
        except OSError as error:
            raise BadRequest(
                f"{target} cannot be written: {error.strerror}.", next_step="Name another file."
            ) from None
        finally:
            part.unlink(missing_ok=True)
    show({"file": str(target)} | counts, as_json=arguments.json, title="exported rows")
    return 0


def _erase(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        wait_until_shipped(tools.settings)
        with tools.database.read() as session:
            scope = scope_named(session, arguments.tenant)
        erased = stored_data(tools).erase_tenant(scope, arguments.confirm)
    show(
        {"erased": erased, "kept": kept()} if arguments.json else erased,
        as_json=arguments.json,
        title="erased rows",
    )
    if not arguments.json:
        say("Kept, because the law or the books need them:")
        for name, why in kept().items():
            say(f"  {name}: {why}")
    return 0
