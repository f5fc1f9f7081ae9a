"""`tollhouse audit-log`: lists the audit log, verifies its hash chain, streams it elsewhere."""

import argparse
from dataclasses import asdict

from sqlalchemy.orm import Session

from billing.notices import audit_streams
from billing.notices.request_sinks import is_bucket
from core.errors import BadRequest
from core.outbound import check_public
from core.tenants import audit, audit_chain, organisations
from gateway.admin.console import add_tenant, command_context, scope_named
from gateway.admin.output import add_json, say, show

HELP = "list the audit log, verify its hash chain, stream it to a webhook or a bucket"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    listed = verbs.add_parser("list", help="the newest entries of a tenant")
    listed.add_argument("--limit", type=int, default=50, help="entries (default 50)")
    listed.set_defaults(run=_list)
    verified = verbs.add_parser(
        "verify", help="check every entry against the hash chain; exit 1 if one was changed"
    )
    verified.add_argument("--tenant", help="name or id; default: all tenants and the operator")
    verified.add_argument(
        "--expect", metavar="DIGEST", default="", help="a digest that was the tenant's last once"
    )
    verified.set_defaults(run=_verify)
    stream = verbs.add_parser("stream", help="show, set or end a tenant's stream")
    either = stream.add_mutually_exclusive_group()
    either.add_argument("--url", help="https://host/path, or s3://bucket/prefix")
    either.add_argument("--off", action="store_true", help="end the stream")
    stream.add_argument("--whole", action="store_true", help="begin with the first entry")
    stream.set_defaults(run=_stream)
    for each in (listed, stream):
        add_tenant(each)
    for each in (listed, verified, stream):
        add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.limit <= 1000:
        raise BadRequest(f"--limit is {arguments.limit}.", next_step="Give 1 to 1000.")
    with command_context() as tools, tools.database.read() as session:
        scope = scope_named(session, arguments.tenant)
        rows = [
            audit.describe(each) for each in audit.entries(session, scope, limit=arguments.limit)
        ]
    if not arguments.json:
        rows = [
            {name: each[name] for name in ("at", "actor", "action", "target")}
            | {"changes": "; ".join(each["changes"])}
            for each in rows
        ]
    show(rows, as_json=arguments.json, title="audit log")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    if arguments.expect and not arguments.tenant:
        raise BadRequest("--expect is given without --tenant.", next_step="Name its tenant.")
    with command_context() as tools, tools.database.read() as session:
        done = {
            name: audit_chain.verify(session, tenant_id, arguments.expect)
            for name, tenant_id in _chains(session, arguments.tenant)
        }
    rows = [{"log": name, **asdict(each)} for name, each in done.items()]
    if arguments.json:
        show(rows, as_json=True)
    else:
        shown = ("log", "entries", "unchained", "emptied", "digest", "fault_count")
        show([{name: row[name] for name in shown} for row in rows], as_json=False, title="chains")
        for name, each in done.items():
            for fault in each.faults:
                say(f"{name}: {fault}")
    return 1 if any(each.fault_count for each in done.values()) else 0


def _chains(session: Session, tenant: str | None) -> list[tuple[str, str | None]]:
    if tenant:
        found = organisations.tenant_named(session, tenant)
        return [(found.name, found.id)]
    every = [(each.name, each.id) for each in organisations.all_tenants(session)]
    return [("(operator)", None), *every]


def _stream(arguments: argparse.Namespace) -> int:
    from gateway.admin.audit.routes import stream_shown  # FastAPI is slow to import

    with command_context() as tools:
        if arguments.url and not is_bucket(arguments.url):
            check_public(arguments.url, tools.settings.webhook_networks)
        with tools.database.transaction() as session:
            scope = scope_named(session, arguments.tenant)
            if arguments.off:
                audit_streams.remove_stream(session, scope, tools.clock)
            if arguments.url:
                made = audit_streams.set_stream(
                    session, scope, tools.clock, arguments.url, whole=arguments.whole
                )
                if not is_bucket(made.url):
                    say(f"The secret that signs it, shown once: {made.secret}")
            shown = stream_shown(audit_streams.stream_of(session, scope))
    show(shown, as_json=arguments.json, title="stream")
    return 0
