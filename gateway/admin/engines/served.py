"""The models that are served, and the drains of their engines, for `tollhouse model`."""

import argparse
from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from billing.pricing.prices import DEFAULT_CURRENCY, load_price_book
from core import engine_drains
from core.errors import NotFound, TollhouseError
from core.settings import Settings
from gateway.admin.console import CommandContext, command_context
from gateway.admin.output import show
from gateway.catalog.model_files import model_name, served_model
from gateway.catalog.model_source import local_copy
from gateway.catalog.upstreams import read_upstreams


def list_models(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with tools.database.read() as session:
            book = load_price_book(session)
        rows = []
        for name, where, context in _served(tools.settings):
            try:
                price = book.pin("", name, None, tools.clock.now(), DEFAULT_CURRENCY).id
            except TollhouseError:
                price = None
            rows.append({"model": name, "engine": where, "context": context, "price": price})
    show(rows, as_json=arguments.json, title="models")
    return 0


def list_engines(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        with tools.database.read() as session:
            drained = engine_drains.drained(session)
        rows = [
            {"engine": name, "model": model, "drained_since": _since(drained.get(name))}
            for name, model in _replicas(tools.settings)
        ]
    show(rows, as_json=arguments.json, title="engines")
    return 0


def known_names(tools: CommandContext, session: Session) -> set[str]:
    """Of the models that are served here, and of those that have a price."""
    priced = {version.model for version in load_price_book(session).versions}
    settings = tools.settings
    upstreams = read_upstreams(settings.upstreams) if settings.upstreams else ()
    return priced | {model_name(settings), *(each.model for each in upstreams if each.model)}


def drain(arguments: argparse.Namespace) -> int:
    return _change(arguments, engine_drains.drain)


def resume(arguments: argparse.Namespace) -> int:
    return _change(arguments, engine_drains.resume)


def _change(arguments: argparse.Namespace, act: Callable[..., None]) -> int:
    with command_context() as tools:
        known = [name for name, _ in _replicas(tools.settings)]
        if arguments.engine not in known:
            raise NotFound(
                f"There is no engine {arguments.engine!r}; known: {', '.join(known)}.",
                next_step="List engines with `tollhouse model engines`.",
            )
        with tools.database.transaction() as session:
            act(session, tools.clock, "operator", arguments.engine)
    return 0


def _since(row: engine_drains.EngineDrain | None) -> str | None:
    return row.since.isoformat(timespec="seconds") if row is not None else None


def _replicas(settings: Settings) -> list[tuple[str, str]]:
    """(engine, model)"""
    if settings.upstreams:
        upstreams = read_upstreams(settings.upstreams)
        return [(each.replica_name, each.model or model_name(settings)) for each in upstreams]
    return [(f"local-{slot}", model_name(settings)) for slot in range(settings.engines)]


def _served(settings: Settings) -> list[tuple[str, str, Any]]:
    if settings.upstreams:
        return [
            (each.model or model_name(settings), each.url, each.context_length)
            for each in read_upstreams(settings.upstreams)
        ]
    path = local_copy(settings.model, settings.data_dir)
    if path is None:
        return [(model_name(settings), f"not fetched: {settings.model}", None)]
    model = served_model(settings, path)
    return [(model.name, str(path), model.context_length)]
