"""TOLLHOUSE_UPSTREAMS, read: which engines there are, where they are, and how they are spoken to.

Addresses split by commas or spaces, a JSON list of objects, or the path of a JSON file with one.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from core.errors import SettingError

WIRE = ("tcp://", "ipc://")
HTTP = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class Upstream:
    """`model` is the public name (empty: TOLLHOUSE_MODEL's), `upstream_model` the server's own."""

    url: str
    name: str = ""  # of the place; stays the same over restarts
    model: str = ""
    upstream_model: str = ""
    api_key: str = ""
    tokenizer: str = ""  # a model directory; empty: TOLLHOUSE_MODEL's where it is served, else none
    context_length: int = 0  # 0: the tokenizer directory's, or 8192
    public_key: str = ""  # CURVE, Z85; empty: TOLLHOUSE_ENGINE_PUBLIC_KEY
    max_in_flight: int = 0  # requests at once; 0 is no bound
    capabilities: tuple[str, ...] = ()  # beyond plain text: tools, json, embeddings, adapters

    @property
    def is_http(self) -> bool:
        return self.url.startswith(HTTP)


def read_upstreams(setting: str) -> list[Upstream]:
    text = setting.strip()
    if not text:
        return []
    if text.startswith("["):
        return _from_json(text, "TOLLHOUSE_UPSTREAMS")
    if not text.startswith((*WIRE, *HTTP)) and Path(text).is_file():
        return _from_json(Path(text).read_text(encoding="utf-8"), text)
    return _checked([Upstream(url) for url in text.replace(",", " ").split()])


def _from_json(text: str, where: str) -> list[Upstream]:
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise _wrong(f"{where} is not JSON: {error}") from None
    if not isinstance(listed, list):
        raise _wrong(f"{where} must be a list of objects")
    return _checked([_one(each, index) for index, each in enumerate(listed)])


def _one(given: Any, index: int) -> Upstream:
    if isinstance(given, str):
        return Upstream(given)
    if not isinstance(given, dict):
        raise _wrong(f"entry {index} is not an object")
    known = {field.name for field in fields(Upstream)}
    for name in given:
        if name not in known:
            raise _wrong(f"entry {index} has the unknown field {name!r}; known: {sorted(known)}")
    if not isinstance(given.get("url"), str):
        raise _wrong(f"entry {index} has no url")
    if "capabilities" in given:
        given = {**given, "capabilities": tuple(given["capabilities"])}
    return Upstream(**given)


def _checked(found: list[Upstream]) -> list[Upstream]:
    names: set[str] = set()
    for each in found:
        if not each.url.startswith((*WIRE, *HTTP)):
            raise _wrong(f"{each.url!r} begins with none of {', '.join((*WIRE, *HTTP))}")
        name = each.name or each.url
        if name in names:
            raise _wrong(f"two entries are called {name!r}")
        names.add(name)
    return found


def _wrong(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_UPSTREAMS is wrong: {problem}.",
        next_step='Write addresses, or [{"url": "tcp://host:5555"}]; docs/settings.md says more.',
    )
