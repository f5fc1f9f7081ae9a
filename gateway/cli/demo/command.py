"""`tollhouse demo`: sends a minute of mixed traffic and shows the usage and cost of each tenant."""

import argparse
import asyncio
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sqlalchemy import func, select

from billing.rating.rating_worker import rate_all
from billing.usage.tables import Charge
from core.money import decimal_of
from core.tenants import bootstrap
from core.tenants.models import Adapter, Tenant
from gateway.admin.console import CommandContext, command_context
from gateway.admin.output import add_json, show
from gateway.catalog.model_files import DEMO_NAME
from gateway.cli.demo import server, traffic
from gateway.metering.spool_watch import wait_until_shipped
from gateway.serving.record import names_here

HELP = "send mixed traffic of several tenants; show tokens, cached share, cost and limits hit"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60, help="duration (default 60)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with server.running_server(tools.settings) as url:
            model = names_here(tools.settings)[0]
            script = _script(tools, model)
            keys = traffic.issue_keys(
                tools.database, tools.clock, [part.tenant for part in script.parts]
            )
            tallies = _send((url, model), script, keys, arguments.seconds)
        rows = [
            _row(tools, tenant, tally)
            for tenant, tally in _wait_until_rated(tools, tallies).items()
        ]
    show(rows, as_json=arguments.json, title="demo")
    return 0 if all(row["failed"] == 0 for row in rows) else 1


def _script(tools: CommandContext, model: str) -> traffic.Workload:
    if model == DEMO_NAME:
        return traffic.load_workload()
    with tools.database.read() as session:
        query = select(Adapter.name).join(Tenant, Tenant.id == Adapter.tenant_id)
        query = query.where(Tenant.name == bootstrap.NAME, Adapter.base_model == model)
        adapters = session.scalars(query.where(Adapter.removed_at.is_(None)).order_by(Adapter.name))
        return traffic.general_script(list(adapters))


def _send(
    server: tuple[str, str], script: traffic.Workload, keys: dict[str, str], seconds: float
) -> dict[str, traffic.Tally]:
    """`server` is its address and the model to ask."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("0 answers", total=seconds)

        def _on_progress(tallies: dict[str, traffic.Tally]) -> None:
            answers = sum(tally.answered for tally in tallies.values())
            progress.update(bar, advance=1, description=f"{answers} answers")

        return asyncio.run(traffic.send(*server, script, keys, seconds, _on_progress))


def _wait_until_rated(
    tools: CommandContext, tallies: dict[str, traffic.Tally]
) -> dict[str, traffic.Tally]:
    """Wait until every answer is recorded, then rate them."""
    wait_until_shipped(tools.settings, timeout_s=20)
    rate_all(tools.database, tools.clock)
    return tallies


def _row(tools: CommandContext, tenant: str, tally: traffic.Tally) -> dict[str, Any]:
    with tools.database.read() as session:
        ids = sorted(tally.request_ids)
        cost = 0
        for start in range(0, len(ids), 500):
            part = ids[start : start + 500]
            amount = session.scalar(
                select(func.sum(Charge.amount)).where(Charge.request_id.in_(part))
            )
            cost += int(amount or 0)
    share = 100 * tally.cached_tokens / tally.input_tokens if tally.input_tokens else 0.0
    return {
        "tenant": tenant,
        "requests": tally.answered,
        "input_tokens": tally.input_tokens,
        "cached": f"{share:.0f} %",
        "output_tokens": tally.output_tokens,
        "cost": decimal_of(cost),
        "limited": tally.limited,
        "blocked": tally.blocked,
        "failed": tally.failed,
    }
