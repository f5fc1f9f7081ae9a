"""What a new list of upstreams changes, without secrets, and the digest by which processes know it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from gateway.catalog.upstreams import Upstream


@dataclass(frozen=True, slots=True)
class UpstreamChange:
    upstream: str  # the replica's name
    model: str
    change: str  # added | removed | changed
    fields: tuple[str, ...] = ()  # names of those that changed

    def described(self) -> dict[str, object]:
        return {**asdict(self), "fields": list(self.fields)}


def changes_between(
    old: Sequence[Upstream], new: Sequence[Upstream], own_model: str
) -> list[UpstreamChange]:
    """`own_model` is the name of those that name none."""
    before = {each.replica_name: each for each in old}
    after = {each.replica_name: each for each in new}
    found = []
    for name, each in after.items():
        model = each.model or own_model
        if name not in before:
            found.append(UpstreamChange(name, model, "added"))
        elif changed := _changed_fields(before[name], each):
            found.append(UpstreamChange(name, model, "changed", changed))
    gone = [each for name, each in before.items() if name not in after]
    found += [
        UpstreamChange(each.replica_name, each.model or own_model, "removed") for each in gone
    ]
    return found


def _changed_fields(old: Upstream, new: Upstream) -> tuple[str, ...]:
    names = (field.name for field in fields(Upstream))
    return tuple(name for name in names if getattr(old, name) != getattr(new, name))


def same_connection(old: Upstream, new: Upstream) -> bool:
    """Whether a client of the old entry serves the new one: the rest belongs to the list."""
    return _connection(old) == _connection(new)


def _connection(upstream: Upstream) -> Upstream:
    return replace(
        upstream, price={}, canary_percent=None, region="", most_searches=0, most_tool_calls=0
    )


def digest_of(upstreams: Sequence[Upstream]) -> str:
    text = json.dumps([asdict(each) for each in upstreams], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canary_shares(upstreams: Sequence[Upstream]) -> dict[str, int]:
    """Percent of its model's conversations, by replica."""
    return {
        each.replica_name: each.canary_percent
        for each in upstreams
        if each.canary_percent is not None
    }
