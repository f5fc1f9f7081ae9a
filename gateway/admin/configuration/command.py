"""`tollhouse apply` makes the deployment what a file says; `tollhouse export config` writes the file."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy.orm import Session

from core.errors import BadRequest
from core.tenants import organisations
from gateway.admin.configuration import files, state
from gateway.admin.configuration.apply import Application
from gateway.admin.configuration.changes import Work
from gateway.admin.configuration.document import Configuration
from gateway.admin.console import command_context
from gateway.admin.output import add_json, say, show

HELP = "make plans, prices and tenants what a file says; exit 2 with --dry-run if they differ"
_DRIFT = 2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", metavar="PATH", help="a YAML or JSON file, or a directory")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would change; exit 2 if anything would"
    )
    parser.add_argument(
        "--prune", action="store_true", help="end what the file's lists of a tenant do not name"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema for editors")
    add_json(parser)
    parser.set_defaults(run=_apply)


def add_config_export(verbs: Any) -> None:
    parser = verbs.add_parser("config", help="write the configuration that `tollhouse apply` reads")
    parser.add_argument("--tenant", help="name or id of one; default: all, with plans and prices")
    parser.add_argument("--output", metavar="FILE", help="default, and `-`: stdout")
    parser.set_defaults(run=_export)


def _apply(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        show(Configuration.model_json_schema(), as_json=True)
        return 0
    if not arguments.file:
        raise BadRequest("No file is named.", next_step="Run `tollhouse apply -f tollhouse.yaml`.")
    source = Path(arguments.file)
    wanted = files.read(source)
    base = source if source.is_dir() else source.parent
    with command_context() as tools:
        secrets = _Secrets(base)
        try:
            with tools.database.transaction() as session:
                done = Work(session, tools.clock, arguments.prune)
                Application(done).run(wanted)
                if arguments.dry_run:
                    session.rollback()
                else:
                    secrets.write(done.secrets)
        except BaseException:
            secrets.discard()
            raise
        secrets.publish()
    if arguments.json:
        rows = [{"place": c.place, "before": c.before, "after": c.after} for c in done.changes]
        show({"changes": rows, "applied": not arguments.dry_run}, as_json=True)
    else:
        for change in done.changes:
            sys.stdout.write(f"{change}\n")
        verb = "would change" if arguments.dry_run else "changed"
        say(f"{len(done.changes)} {verb}." if done.changes else "Nothing differs.")
    return _DRIFT if arguments.dry_run and done.changes else 0


class _Secrets:
    """Secrets of new keys and webhooks: written before the transaction ends, and named after it, so
    that no key exists whose secret was lost, and no file whose key was rolled back."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._written: list[tuple[Path, Path]] = []

    def write(self, secrets: Mapping[str, str]) -> None:
        for name, secret in secrets.items():
            path = self._base / name
            part = path.with_name(f".{path.name}.part")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                part.unlink(missing_ok=True)
                with os.fdopen(
                    os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
                ) as file:
                    file.write(f"{secret}\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise BadRequest(f"{path} cannot be written: {error.strerror}.") from None
            self._written.append((part, path))

    def publish(self) -> None:
        for part, path in self._written:
            part.replace(path)
            say(f"wrote {path}")

    def discard(self) -> None:
        for part, _ in self._written:
            part.unlink(missing_ok=True)


def _export(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        text = _text_of(session, tools.clock.now(), arguments.tenant)
    if arguments.output in (None, "-"):
        sys.stdout.write(text)
        return 0
    path = Path(arguments.output)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}.") from None
    say(f"wrote {path}")
    return 0


def _text_of(session: Session, now: Any, tenant: str | None) -> str:
    chosen = organisations.all_tenants(session)
    if tenant:
        chosen = [organisations.tenant_named(session, tenant)]
    document = state.read(session, now, chosen)
    shown = document.model_dump(by_alias=True, exclude_unset=True)
    if tenant:
        shown = {"tenants": shown["tenants"]}
    # `$` begins a reference in a file that is read.
    plain = json.loads(json.dumps(shown).replace("$", "$$"))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
