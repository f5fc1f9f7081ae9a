"""`tollhouse provider reconcile`: a provider's usage report against our usage events.

Ours are the events whose engine is an entry of TOLLHOUSE_UPSTREAMS with that provider, by the entry's
`upstream_model`; a report's dated name of a model (`gpt-4o-2024-08-06`) is that of its entry's.
"""

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.usage.event_components import decode_components
from billing.usage.tables import UsageEventRow
from core.errors import BadRequest
from core.events import Components
from gateway.admin.console import command_context, text_of
from gateway.admin.output import say, show
from gateway.admin.providers import reports
from gateway.admin.providers.reports import FIELDS, Counted, Place
from gateway.catalog.upstreams import Upstream, read_upstreams

_AT_ONCE = 5_000  # rows of a read
_DATED = re.compile(r"[-@](?:\d{8}|\d{4}-\d{2}-\d{2})", re.ASCII)


def reconcile(arguments: argparse.Namespace) -> int:
    """0 if nothing differs, 1 if something does."""
    theirs = reports.parse(text_of(arguments.file))
    keys = _keys_of(arguments.key)
    with command_context() as tools:
        entries = [
            each
            for each in read_upstreams(tools.settings.upstreams)
            if each.provider == arguments.provider
        ]
        if not entries:
            raise BadRequest(
                f"No entry of TOLLHOUSE_UPSTREAMS has the provider {arguments.provider!r}.",
                next_step="Give --provider as the entries name it.",
                param="provider",
            )
        days = sorted(day for day, _, _ in theirs)
        with tools.database.read() as session:
            ours = recorded(session, entries, keys, (days[0], days[-1]))
    rows = differences(ours, _named(theirs, entries, keys), every=arguments.all)
    different = any(row["difference"] for row in rows)
    show(rows, as_json=arguments.json, title="differences")
    if not arguments.json and not different:
        say("Nothing differs.")
    return 1 if different else 0


def recorded(
    session: Session, entries: Iterable[Upstream], keys: Mapping[str, str], days: tuple[date, date]
) -> dict[Place, Counted]:
    """Our counts by day, upstream model and, where keys are named, entry."""
    models = {each.replica_name: each.upstream_model or each.model for each in entries}
    row, found = UsageEventRow, dict[Place, Counted]()
    start = datetime.combine(days[0], time(), UTC)
    end = datetime.combine(days[1], time(), UTC) + timedelta(days=1)
    query = select(
        *(row.occurred_at, row.engine_id, row.input_tokens, row.cached_tokens, row.output_tokens),
        *(row.waived_tokens, row.components),
    ).where(
        row.engine_id.in_(models),
        row.occurred_at >= start,
        row.occurred_at < end,
        row.input_tokens + row.cached_tokens + row.output_tokens > 0,
    )
    for each in session.execute(query.execution_options(yield_per=_AT_ONCE)):
        parts = decode_components(each.components) if each.components else Components()
        written = parts.cache_write_5m + parts.cache_write_1h
        counted = Counted(
            1,
            each.input_tokens - each.cached_tokens - written,
            each.cached_tokens,
            written,
            each.output_tokens + each.waived_tokens,
        )
        key = each.engine_id if keys else ""
        place = (each.occurred_at.date(), models[each.engine_id], key)
        known = found.get(place)
        found[place] = counted if known is None else known.plus(counted)
    return found


def differences(
    ours: Mapping[Place, Counted], theirs: Mapping[Place, Counted], *, every: bool = False
) -> list[dict[str, Any]]:
    """By day, model, key and field, where the two differ, or of all fields that one of them counts."""
    rows = []
    for place in sorted(ours.keys() | theirs.keys()):
        pairs = zip(
            FIELDS,
            astuple(ours.get(place, Counted())),
            astuple(theirs.get(place, Counted())),
            strict=True,
        )
        for field, own, reported in pairs:
            if reported is None or not (own != reported or (every and own)):
                continue
            day, model, key = place
            rows.append(
                {
                    "day": day.isoformat(),
                    "model": model,
                    "key": key or "all",
                    "counted": field,
                    "ours": own,
                    "reported": reported,
                    "difference": reported - own,
                }
            )
    return rows


def _named(
    theirs: Mapping[Place, Counted], entries: Iterable[Upstream], keys: Mapping[str, str]
) -> dict[Place, Counted]:
    """The report with our names: of models those of the entries, of keys those that are given."""
    models = {each.upstream_model or each.model for each in entries}
    found: dict[Place, Counted] = {}
    for (day, model, key), counted in theirs.items():
        plain = _DATED.sub("", model)
        name = model if model in models or plain not in models else plain
        place = (day, name, keys.get(key, key) if keys else "")
        known = found.get(place)
        found[place] = counted if known is None else known.plus(counted)
    return found


def _keys_of(given: Iterable[str]) -> dict[str, str]:
    found = {}
    for each in given:
        key, equals, entry = each.partition("=")
        if not (key and equals and entry):
            raise BadRequest(
                f"--key {each[:60]!r} is not ID=ENTRY.",
                next_step="Write the provider's api_key_id and the name of the entry with that key.",
                param="key",
            )
        found[key] = entry
    return found
