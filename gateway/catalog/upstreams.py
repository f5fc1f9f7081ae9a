"""Parses TOLLHOUSE_UPSTREAMS: the engines, their addresses and their options.

The value is a list of addresses separated by commas or spaces, a JSON list of objects, or the path
of a file with one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from core.errors import SettingError
from gateway.catalog.providers import PROVIDERS, problem_with_options

WIRE = ("tcp://", "ipc://")
HTTP = ("http://", "https://")
ENDPOINTS = (
    *("audio/transcriptions", "audio/translations", "audio/speech"),
    *("images/generations", "images/edits", "images/variations"),
)
_LONGEST_REGION = 40
_NUMBERS = (
    *("max_in_flight", "requests_per_minute", "context_length"),
    *("most_searches", "most_tool_calls"),
)
# Kinds of servers whose prefix cache can be kept apart by tenant: by a `cache_salt`, or (llama.cpp)
# by not reusing it.
SALTED_ENGINES = frozenset(("vllm", "sglang"))
ISOLATING_ENGINES = SALTED_ENGINES | {"llama.cpp"}


@dataclass(frozen=True, slots=True)
class Upstream:
    """`model` is the public name (empty: TOLLHOUSE_MODEL's), `upstream_model` the server's name."""

    url: str
    name: str = ""  # of the replica; stays the same when its process restarts
    model: str = ""
    upstream_model: str = ""
    api_key: str = ""
    tokenizer: str = ""  # a model directory; empty: TOLLHOUSE_MODEL's if it is served, else none
    context_length: int = 0  # 0: the server is asked for it
    public_key: str = ""  # CURVE, Z85; empty: TOLLHOUSE_ENGINE_PUBLIC_KEY
    # vllm, sglang, llama.cpp, tgi, ollama, lmstudio, tensorrt-llm or dynamo; empty: the server's own
    # pages say it.
    engine: str = ""
    # Parameters that it supports beyond OpenAI's and those of its `engine`: top_k, min_p, …
    parameters: tuple[str, ...] = ()
    # Fields of a chat or completion that the gateway does not know and passes on as they are.
    extra_fields: tuple[str, ...] = ()
    price: dict[str, Any] = field(default_factory=dict)  # in the form of `tollhouse price`
    max_in_flight: int = 0  # concurrent requests of all gateway processes; 0: no limit
    requests_per_minute: int = 0  # of all gateway processes; 0: no limit
    # The most searches and calls of its own tools that one request makes there: budgets hold their
    # price. 0: none is held, and what was made is charged after it.
    most_searches: int = 0
    most_tool_calls: int = 0
    region: str = ""  # where it stands, for usage by region
    # Share of its model's conversations that it gets, in percent; the other entries share the rest.
    # None: it is one of those.
    canary_percent: int | None = None
    capabilities: tuple[
        str, ...
    ] = ()  # besides text: tools, json, grammar, embeddings, images, audio, adapters; empty: by its kind
    # What it serves besides text: see ENDPOINTS.
    endpoints: tuple[str, ...] = ()
    # Whether tenants may share its prefix cache, whose timing tells whether a prompt was seen before.
    # None: they are kept apart where its `engine` can do that.
    shared_cache: bool | None = None
    # Whether clients read the server's own text of a refusal, without secrets and addresses. None: of
    # the kinds of servers that write it about the request alone.
    error_text: bool | None = None

    # Whether the reasoning of the turns of a tool loop goes back to it, which some models need
    # (DeepSeek's): as `reasoning_content` of the assistant's messages after the last of the user's.
    reasoning_back: bool = False
    # Whose API it speaks, of `catalog/providers.py`; empty: OpenAI's, as self-hosted servers do.
    provider: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of the provider

    @property
    def replica_name(self) -> str:
        """The replica's name in usage events, metrics and commands."""
        return (self.name or self.url)[:80]

    @property
    def shares_cache(self) -> bool:
        """Whether tenants share the server's prefix cache, by what the entry declares."""
        return self.shares_cache_as(self.engine)

    def shares_cache_as(self, kind: str) -> bool:
        """Whether tenants share the prefix cache of a server of that kind."""
        if not self.is_http or self.provider:
            return (
                False  # a provider keeps its customers apart; tenants share the operator's account
            )
        return bool(self.shared_cache) or kind not in ISOLATING_ENGINES

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
        raise _invalid(f"{where} is not JSON: {error}") from None
    if not isinstance(listed, list):
        raise _invalid(f"{where} is not a list of objects")
    return _checked([_parse_entry(each, index) for index, each in enumerate(listed)])


def _parse_entry(given: Any, index: int) -> Upstream:
    if isinstance(given, str):
        return Upstream(given)
    if not isinstance(given, dict):
        raise _invalid(f"entry {index} is not an object")
    known = {each.name for each in fields(Upstream)}
    for name in given:
        if name not in known:
            raise _invalid(f"entry {index} has the unknown field {name!r}; known: {sorted(known)}")
    given = _with_address(given, index)
    if not isinstance(given.get("url"), str):
        raise _invalid(f"entry {index} has no url")
    listed = {
        name: _names(name, given[name])
        for name in ("capabilities", "parameters", "extra_fields", "endpoints")
        if name in given
    }
    upstream = Upstream(**{**given, **listed})
    if not isinstance(upstream.price, dict) or any(
        type(v) is float for v in upstream.price.values()
    ):
        raise _invalid(
            f'the price of {upstream.url} is not like {{"input": "0.10", "output": "0.40"}}'
        )
    if not isinstance(upstream.region, str) or len(upstream.region) > _LONGEST_REGION:
        raise _invalid(
            f"region of {upstream.url} is not a name of up to {_LONGEST_REGION} characters"
        )
    _check_shared_cache(upstream)
    if upstream.error_text is not None and type(upstream.error_text) is not bool:
        raise _invalid(
            f"error_text of {upstream.url} is {upstream.error_text!r}, not true or false"
        )
    if type(upstream.reasoning_back) is not bool:
        raise _invalid(
            f"reasoning_back of {upstream.url} is {upstream.reasoning_back!r}, not true or false"
        )
    _check_endpoints(upstream)
    for name in _NUMBERS:
        value = getattr(upstream, name)
        if type(value) is not int or value < 0:
            raise _invalid(f"{name} of {upstream.url} is {value!r}, not a whole number from 0")
    share = upstream.canary_percent
    if share is not None and not (type(share) is int and 0 <= share <= 100):
        raise _invalid(f"canary_percent of {upstream.url} is {share!r}, not between 0 and 100")
    return upstream


def _with_address(given: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """The entry, with the address of its provider where it has none of its own."""
    name = given.get("provider", "")
    if not name:
        if given.get("options"):
            raise _invalid(f"entry {index} has options, but no provider that reads them")
        return given
    if name not in PROVIDERS:
        known = ", ".join(PROVIDERS)
        raise _invalid(f"entry {index} has the unknown provider {name!r}; known: {known}")
    if problem := problem_with_options(name, given.get("options", {})):
        raise _invalid(f"entry {index}: {problem}")
    if not (given.get("api_key") or PROVIDERS[name].keyless):
        raise _invalid(f"entry {index} has no api_key, which {name} needs")
    for field_name in ("engine", "public_key"):
        if given.get(field_name):
            raise _invalid(f"entry {index} has {field_name}, which {name} does not read")
    if name == "deepseek":  # its models need the reasoning of a tool loop back
        given = {"reasoning_back": True, **given}
    address = PROVIDERS[name].address(given.get("options", {}))
    if "url" in given or not address:
        return given
    return {"url": address, "name": f"{name}:{given.get('model', '')}", **given}


def _check_shared_cache(upstream: Upstream) -> None:
    declared = upstream.shared_cache
    if declared is not None and type(declared) is not bool:
        raise _invalid(f"shared_cache of {upstream.url} is {declared!r}, not true or false")
    if declared is False and upstream.shares_cache:
        raise _invalid(
            f"shared_cache of {upstream.url} is false, but a prefix cache is kept apart by tenant "
            f"only with the engines {', '.join(sorted(ISOLATING_ENGINES))}"
        )


def _check_endpoints(upstream: Upstream) -> None:
    for name in upstream.endpoints:
        if name not in ENDPOINTS:
            raise _invalid(
                f"endpoints of {upstream.url} has {name!r}; known: {', '.join(ENDPOINTS)}"
            )
    if upstream.endpoints and not upstream.is_http:
        raise _invalid(f"{upstream.url} is not an HTTP server, so it cannot have endpoints")


def _names(field_name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _invalid(f"{field_name} is not a list of names")
    return tuple(value)


def _checked(upstreams: list[Upstream]) -> list[Upstream]:
    names: set[str] = set()
    for each in upstreams:
        if not each.url.startswith((*WIRE, *HTTP)):
            raise _invalid(f"{each.url!r} does not begin with one of {', '.join((*WIRE, *HTTP))}")
        name = each.name or each.url
        if name in names:
            raise _invalid(
                f"two entries have the name {name!r}"
                if each.name
                else f"two entries have the url {name!r} and no name: set `name` in each of them"
            )
        names.add(name)
    _check_prices(upstreams)
    _check_canaries(upstreams)
    return upstreams


def _check_canaries(upstreams: list[Upstream]) -> None:
    shares: dict[str, int] = {}
    for each in upstreams:
        shares[each.model] = shares.get(each.model, 0) + (each.canary_percent or 0)
        if shares[each.model] > 100:
            raise _invalid(f"the canary_percent of {each.model!r} sum to more than 100")


def _check_prices(upstreams: list[Upstream]) -> None:
    priced: dict[str, dict[str, Any]] = {}
    for each in upstreams:
        if each.price and priced.setdefault(each.model, each.price) != each.price:
            raise _invalid(
                f"two entries of the model {each.model!r} have different prices: give each its own "
                "model name, and connect them with TOLLHOUSE_FALLBACKS"
            )


def _invalid(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_UPSTREAMS is invalid: {problem}.",
        next_step='Write addresses, or [{"url": "tcp://host:5555"}]; see docs/operator.md.',
    )
