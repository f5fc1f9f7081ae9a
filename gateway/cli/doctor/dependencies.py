"""Checks of what the gateway depends on: Redis, the broker, engines, Stripe, and its own port."""

import asyncio
import json
import socket
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import redis
from redis.exceptions import RedisError
from sqlalchemy import func, select

from billing.payments.tables import PaymentCommand, PaymentWebhook
from core.clock import Clock
from core.database import Database, Limits
from core.extras import imports_of
from core.redis_client import is_cluster, node_url
from core.settings import Settings
from gateway.catalog.upstreams import ISOLATING_ENGINES, Upstream, read_upstreams
from gateway.cli.doctor.check import Finding, bad, good, unused, warn
from gateway.cli.doctor.upstream_flags import probe_servers
from gateway.engines.clients import make_engines
from gateway.metering.streams.storing import stream_state
from migrations.run import current

TIMEOUT_S = 2.0
HELLO_S = 3.0  # for engines to answer
MOST_STREAM_AGE_S = 300.0


def counters(settings: Settings, _clock: Clock) -> Finding:
    if not settings.redis_url:
        if settings.workers > 1:
            return warn(
                f"each of {settings.workers} workers counts limits in its own memory",
                "Set TOLLHOUSE_REDIS_URL so that the workers share one count.",
            )
        return unused("limits are counted in memory")
    client = redis.Redis.from_url(
        node_url(settings.redis_url), socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )
    try:
        version = client.info("server")["redis_version"]
        enabled = bool(client.info("cluster").get("cluster_enabled"))
    except RedisError as error:
        return bad(f"Redis does not answer: {error}", "Check TOLLHOUSE_REDIS_URL.")
    finally:
        client.close()
    if enabled != is_cluster(settings.redis_url):
        scheme = "redis+cluster://" if enabled else "redis://"
        return bad(
            f"TOLLHOUSE_REDIS_URL does not begin with {scheme}",
            f"Use the scheme {scheme} for this server.",
        )
    return good(f"Redis {version}{', a cluster' if enabled else ''}")


def broker(settings: Settings, _clock: Clock) -> Finding:
    if not settings.broker_url:
        return unused("tasks run inside the gateway")
    from kombu.connection import Connection

    try:
        with Connection(settings.broker_url, connect_timeout=TIMEOUT_S) as connection:  # type: ignore[no-untyped-call]
            connection.ensure_connection(max_retries=1, timeout=TIMEOUT_S)
            kind = connection.transport.driver_type
    except Exception as error:
        return bad(f"the broker does not answer: {error}", "Check TOLLHOUSE_BROKER_URL.")
    return good(f"{kind} answers; tasks need `tollhouse worker`")


def stream(settings: Settings, clock: Clock) -> Finding:
    if not settings.stream_url:
        return unused("gateways write usage to the database")
    state = stream_state(settings, clock)
    if state.problem:
        return bad(state.problem, "Usage stays in the gateways' spools until the stream answers.")
    summary = f"{state.messages} messages to store"
    if state.age_s > MOST_STREAM_AGE_S:
        start = "Start `tollhouse worker`" if settings.broker_url else "Start a gateway"
        summary += f", the oldest {state.age_s:.0f} s old"
        return bad(summary, f"{start}; its log says why usage is not stored.")
    return good(summary)


def model(settings: Settings, _clock: Clock) -> Finding:
    """Check that the checkpoint's files are present, without loading it."""
    if settings.upstreams:
        return unused("engines run elsewhere")
    from gateway.catalog.model_source import local_copy

    directory = local_copy(settings.model, settings.data_dir)
    if directory is None:
        return bad(
            f"{settings.model} is not on this machine",
            f"Run `tollhouse model fetch {settings.model}`, or let `tollhouse serve` fetch it.",
        )
    if directory.is_file():
        return _gguf(directory)
    expected = ("config.json", "tokenizer.json")
    missing = [name for name in expected if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        return bad(
            f"{directory} lacks {', '.join(missing)}", "Set TOLLHOUSE_MODEL to a checkpoint."
        )
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        return bad(
            f"{directory}/config.json is not JSON: {error}", "Download the checkpoint again."
        )
    kind = ", ".join(config.get("architectures", ["unknown architecture"]))
    return good(f"{directory.name}: {kind}")


def _gguf(file: Path) -> Finding:
    from gateway.catalog.checkpoint import read_config

    config = read_config(file)
    return good(f"{file.name}: {', '.join(config.get('architectures', ['unknown architecture']))}")


def upstreams(settings: Settings, _clock: Clock) -> Finding:
    if not settings.upstreams:
        return unused("the engine is local")
    unreachable = []
    entries = read_upstreams(settings.upstreams)
    addresses = [each.url for each in entries]
    for address in addresses:
        parts = urlsplit(address)
        if parts.scheme == "ipc":
            continue
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), TIMEOUT_S).close()
        except OSError as error:
            unreachable.append(f"{address} ({error.strerror or error})")
    if unreachable:
        return bad(
            f"no answer from {', '.join(unreachable)}",
            "Start the engine, or correct TOLLHOUSE_UPSTREAMS.",
        )
    if refusals := asyncio.run(_refusals(settings, entries)):
        return bad(
            "; ".join(refusals), "Correct TOLLHOUSE_MODEL, TOLLHOUSE_UPSTREAMS or the CURVE keys."
        )
    # A provider has no pages that say what it is, and its key goes in a header of its own.
    own = [entry for entry in entries if entry.is_http and not entry.provider]
    servers = asyncio.run(probe_servers(own))
    sharing = [
        probe.entry.url
        for probe in servers
        if probe.entry.shares_cache_as(probe.kind) and probe.entry.shared_cache is None
    ]
    lacks = [
        f"{probe.entry.url} ({probe.name}): {each}" for probe in servers for each in probe.lacks
    ]
    if lacks:
        return warn("; ".join(lacks), "Start the server with that, or do without what it is for.")
    if sharing:
        return warn(
            f"{len(addresses)} reachable; tenants share the prefix cache of {', '.join(sharing)}, "
            "whose timing tells whether a prompt was seen before",
            'Declare "shared_cache": true in the entry, or name its engine if it is one of '
            f"{', '.join(sorted(ISOLATING_ENGINES))}.",
        )
    kinds = ", ".join(probe.name for probe in servers if probe.kind)
    return good(f"{len(addresses)} reachable{f': {kinds}' if kinds else ''}")


async def _refusals(settings: Settings, entries: list[Upstream]) -> list[str]:
    """Why engines of the built-in kind get no requests: each is connected to as a gateway does."""
    own = [entry for entry in entries if not entry.is_http]
    clients = [
        client
        for listed in make_engines(settings, own, _nothing, _nothing).clients.values()
        for client in listed
    ]
    found = []
    for client in clients:
        await client.start()
    try:
        deadline = time.monotonic() + HELLO_S
        for client in clients:
            while client.info() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            if client.info() is None:
                why = client.refusal or "it loads its model, or it has another version"
                found.append(f"{client.engine_id} listens but does not answer: {why}")
            elif not client.healthy() and client.refusal:
                found.append(f"{client.engine_id}: {client.refusal}")
    finally:
        for client in clients:
            await client.close()
    return found


def _nothing(*_: object) -> None:
    """Receipts and cache events are not the doctor's."""


def payments(settings: Settings, _clock: Clock) -> Finding:
    if not settings.stripe_api_key:
        return unused("payments are recorded manually")
    with imports_of("stripe", "TOLLHOUSE_STRIPE_API_KEY"):
        import stripe

        from billing.payments.stripe.client import make_client

    client = make_client(settings.stripe_api_key, settings.stripe_api_base, timeout_s=5)
    try:
        client.v1.balance.retrieve()
    except stripe.StripeError as error:
        return bad(
            f"Stripe returned an error: {error.user_message or error}",
            "Check TOLLHOUSE_STRIPE_API_KEY.",
        )
    if not settings.stripe_webhook_secret:
        return warn(
            "Stripe answers, but TOLLHOUSE_STRIPE_WEBHOOK_SECRET is not set",
            "Set it; without webhooks payments stay pending.",
        )
    return good("Stripe answers")


def port(settings: Settings, _clock: Clock) -> Finding:
    if settings.port == 0:
        return good("a free port is chosen at startup")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return warn(
                f"{settings.host}:{settings.port} is in use ({error.strerror})",
                "If Tollhouse is not running, choose another port with TOLLHOUSE_PORT.",
            )
    return good(f"{settings.host}:{settings.port} is free")


LATE = timedelta(hours=1)


def queue(settings: Settings, clock: Clock) -> Finding:
    """Report refused commands and parked events with their reasons, and commands that are late."""
    if not settings.stripe_api_key:
        return unused("nothing is sent to a payment provider")
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    command, event = PaymentCommand, PaymentWebhook
    try:
        if current(database) is None:
            return unused("the database is empty")
        with database.read() as session:
            refused = session.scalars(
                select(command.last_error).where(command.failed.is_(True)).limit(50)
            ).all()
            parked = session.scalars(
                select(event.parked).where(event.parked.is_not(None)).limit(50)
            ).all()
            late = session.scalar(
                select(func.count())
                .select_from(command)
                .where(
                    command.done_at.is_(None),
                    command.failed.is_(False),
                    command.created_at < clock.now() - LATE,
                )
            )
    finally:
        database.close()
    summary = f"{len(refused)} refused commands, {len(parked)} parked events, {late} late"
    if refused or parked or late:
        reasons = list(dict.fromkeys(str(each) for each in (*refused, *parked)))[:3]
        return warn(
            "; ".join([summary, *reasons]),
            "List them with `tollhouse payment outbox` and `tollhouse payment events`, fix the cause, "
            "then run `tollhouse payment retry`.",
        )
    return good(summary)
