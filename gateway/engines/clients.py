"""Builds engine clients and served models from the configured upstreams."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import zmq.auth

from billing.pricing.pricing import Component, Counts
from core.clock import SystemClock
from core.counters import Counters
from core.counters_memory import MemoryCounters
from core.errors import SettingError
from core.settings import Settings
from engine.protocol import KvEvent, Receipt
from engine.worker.curve import ClientKeys
from gateway.catalog.catalog import OPEN_CONTEXT, ServedModel
from gateway.catalog.codec.tokenizing import TextCodec, load_codec
from gateway.catalog.model_files import model_name, sampling_defaults, served_model
from gateway.catalog.model_source import locate_configured
from gateway.catalog.upstreams import Upstream
from gateway.engines.model_identity import Entry, ModelIdentity
from gateway.engines.openai import OpenAIEngine
from gateway.engines.openai_body import KINDS
from gateway.engines.ports.client import ProviderEngine
from gateway.engines.remote import RemoteEngine
from gateway.engines.upstream_limits import UpstreamLimits
from gateway.engines.upstream_usage import CountTokens
from gateway.request.engine import EngineClient
from gateway.request.inference import EXTRA

# Of our own engine.
OWN_CAPABILITIES = frozenset({"tools", "json", "grammar", "embeddings", "rerank", "score"})


@dataclass(frozen=True, slots=True)
class Engines:
    clients: dict[str, list[EngineClient]]  # by public model name
    models: list[ServedModel]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a new list of upstreams takes over from the one in force."""

    clients: Mapping[str, EngineClient] = field(default_factory=dict)  # by replica name
    models: Mapping[str, ServedModel] = field(
        default_factory=dict
    )  # their tokenizers are not read again


NOTHING_KEPT = Kept()


def make_engines(
    settings: Settings,
    upstreams: list[Upstream],
    on_stray_receipt: Callable[[str, Receipt], None],
    on_kv_events: Callable[[str, list[KvEvent]], None],
    counters: Counters | None = None,
    *,
    kept: Kept = NOTHING_KEPT,
) -> Engines:
    """Build a client for each upstream. KV events are requested only from models with several
    replicas; `on_kv_events` is called with the replica's name and the events."""
    own = model_name(settings)
    replica_counts = Counter(upstream.model or model_name(settings) for upstream in upstreams)
    clients: dict[str, list[EngineClient]] = {}
    models: dict[str, ServedModel] = {}
    fields: dict[str, frozenset[str]] = {}
    endpoints: dict[str, frozenset[str]] = {}
    identities = _kept_identities(kept)
    with_reasoning = {
        each.model or model_name(settings) for each in upstreams if each.reasoning_back
    }
    for upstream in upstreams:
        name = upstream.model or model_name(settings)
        _check_kind(upstream)
        if name not in models:
            models[name] = kept.models.get(name) or _model(settings, upstream, name)
        client: EngineClient
        if upstream.replica_name in kept.clients:
            client = kept.clients[upstream.replica_name]
        elif upstream.is_http:
            clock = SystemClock()
            limits = UpstreamLimits(
                upstream, counters or MemoryCounters(clock), clock, processes=settings.workers
            )
            kind = ProviderEngine if upstream.provider else OpenAIEngine
            client = kind(
                upstream, upstream.upstream_model or name, limits, _token_count(models[name].codec)
            )
        else:
            client = RemoteEngine(
                upstream.replica_name,
                upstream.url,
                keys=_keys(settings, upstream),
                identity=identities.setdefault(name, _identity(models[name])),
                entry=Entry(upstream.canary_percent is not None, bool(upstream.tokenizer)),
                on_kv_events=partial(on_kv_events, upstream.replica_name)
                if replica_counts[name] > 1
                else None,
                on_stray_receipt=on_stray_receipt,
            )
        clients.setdefault(name, []).append(client)
        named = frozenset(upstream.extra_fields)
        fields[name] = fields.get(name, named) & named
        declared = frozenset(upstream.endpoints)
        endpoints[name] = endpoints.get(name, declared) & declared
    for name, replicas in clients.items():
        capabilities, parameters = shared_by(replicas)
        models[name] = replace(
            models[name],
            capabilities=capabilities,
            parameters=parameters,
            extra_fields=fields[name],
            endpoints=endpoints[name],
            reasoning_back=name in with_reasoning,
            bound=_bound([each for each in upstreams if (each.model or own) == name]),
        )
    return Engines(clients, list(models.values()))


def shared_by(
    replicas: Sequence[EngineClient],
) -> tuple[frozenset[str], frozenset[str] | None]:
    """The capabilities and the sampling parameters (None: all) that each replica of a model has, since
    any may be chosen."""
    servers = [each for each in replicas if isinstance(each, OpenAIEngine)]
    listed = [each.capabilities for each in servers]
    if len(servers) < len(replicas):
        listed.append(OWN_CAPABILITIES)
    parameters = frozenset.intersection(*(s.parameters for s in servers)) if servers else None
    return frozenset.intersection(*listed), parameters


def _bound(upstreams: Sequence[Upstream]) -> Counts | None:
    """The most that one request makes at any of them."""
    searches = max((each.most_searches for each in upstreams), default=0)
    calls = max((each.most_tool_calls for each in upstreams), default=0)
    if not searches and not calls:
        return None
    return Counts((), ((Component.SEARCH, searches), (Component.TOOL_CALL, calls)))


def _identity(model: ServedModel) -> ModelIdentity:
    codec = model.codec
    if codec is None:
        return ModelIdentity(model.name)
    text = codec.tokenizer.to_str()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return ModelIdentity(model.name, digest, codec.vocab_size)


def _kept_identities(kept: Kept) -> dict[str, ModelIdentity]:
    """Of the models whose engines stay connected."""
    clients = [each for each in kept.clients.values() if isinstance(each, RemoteEngine)]
    return {each.identity.name: each.identity for each in clients if each.identity is not None}


def _token_count(codec: TextCodec | None) -> CountTokens | None:
    return (lambda text: len(codec.encode(text))) if codec is not None else None


def _check_kind(upstream: Upstream) -> None:
    named = frozenset(upstream.parameters)
    if not upstream.is_http:
        return
    if upstream.engine not in KINDS or not named <= EXTRA.keys():
        raise SettingError(
            f"TOLLHOUSE_UPSTREAMS is wrong: {upstream.url} has engine {upstream.engine!r} and "
            f"parameters {sorted(named)}.",
            next_step=f"Engines: {', '.join(filter(None, KINDS))}. Parameters: {', '.join(EXTRA)}.",
        )


def _model(settings: Settings, upstream: Upstream, name: str) -> ServedModel:
    """An upstream's model exists, for clients, since this gateway serves it."""
    created = int(SystemClock().now().timestamp())
    if upstream.tokenizer:
        path = Path(upstream.tokenizer)
        if not (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
            raise SettingError(
                f"The tokenizer of upstream {name} is {path}, which is neither a directory nor a "
                ".gguf file.",
                next_step="Give a model directory with a tokenizer.json, or a .gguf file.",
            )
        context = upstream.context_length or OPEN_CONTEXT
        defaults = sampling_defaults(path)
        return ServedModel(name, load_codec(path), context, created, defaults=defaults)
    if upstream.is_http and upstream.model != model_name(settings):
        return ServedModel(name, None, upstream.context_length or OPEN_CONTEXT, created)
    if upstream.is_http and not settings.model:
        return ServedModel(name, None, upstream.context_length or OPEN_CONTEXT, created)
    return served_model(settings, locate_configured(settings, weights=False))


def _keys(settings: Settings, upstream: Upstream) -> ClientKeys | None:
    """CURVE keys for a tcp:// upstream, if configured. File permissions protect ipc:// sockets."""
    public_key = upstream.public_key or settings.engine_public_key
    file = settings.engine_secret_key_file
    if not public_key or not upstream.url.startswith("tcp://"):
        return None
    if file is None:
        raise SettingError(
            "TOLLHOUSE_ENGINE_PUBLIC_KEY is set, but the gateway has no key pair of its own.",
            next_step="Set TOLLHOUSE_ENGINE_SECRET_KEY_FILE.",
        )
    try:
        public, secret = zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"TOLLHOUSE_ENGINE_SECRET_KEY_FILE {file} cannot be read: {error}.",
            next_step="Create a key pair with zmq.auth.create_certificates.",
        ) from None
    if secret is None:
        raise SettingError(
            f"TOLLHOUSE_ENGINE_SECRET_KEY_FILE {file} contains no secret key.",
            next_step="Name the file with the secret key.",
        )
    return ClientKeys(public_key.encode(), public, secret)
