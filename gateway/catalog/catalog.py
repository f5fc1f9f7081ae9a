"""The models served and each tenant's adapters, in memory, refreshed in the background."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from msgspec import Struct

from billing.pricing.pricing import Counts
from core.errors import BadRequest, Forbidden, ModelNotFound
from core.tenants.keys import Principal
from engine.model_spec import ModelSpec
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.catalog.virtual_models import VirtualModel

# For a model whose upstream reports no context length and applies its own. Above any real one.
OPEN_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model. `codec` is None where only the engine has the tokenizer."""

    name: str
    codec: TextCodec | None
    context_length: int
    created: int  # Unix seconds
    owned_by: str = "tollhouse"
    # Sampling parameters beyond OpenAI's that its engines support; None: all that the gateway knows.
    parameters: frozenset[str] | None = None
    # Sampling defaults from its generation_config.json.
    defaults: Mapping[str, float] = field(default_factory=dict)
    # Besides text: tools (forced tool choice), json, grammar, embeddings, images, audio.
    capabilities: frozenset[str] = frozenset()
    endpoints: frozenset[str] = frozenset()  # of audio and images, such as audio/speech
    # Fields of the body that its upstreams take and the gateway does not know.
    extra_fields: frozenset[str] = frozenset()
    reasoning_back: bool = False  # an upstream of it gets the reasoning of a tool loop's turns
    # What a request may cost at its upstreams besides tokens, for which budgets hold money.
    bound: Counts | None = None
    spec: ModelSpec | None = None  # its shape, where this gateway has its configuration

    @property
    def known_context(self) -> int | None:
        return self.context_length if self.context_length < OPEN_CONTEXT else None


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    name: str
    base_model: str
    digest: str
    path: str
    created_at: datetime
    quarantined: str = ""  # why it may not be used


class Target(Struct, frozen=True):
    """What a `model` field names: a base model, optionally with one of the tenant's adapters."""

    public_name: str  # as the client wrote it; echoed in responses
    model: ServedModel
    adapter: NamedAdapter | None = None
    virtual: VirtualModel | None = None  # whose pool the model belongs to


class Catalog:
    """Look-ups are in memory; `set_adapters` replaces all adapters at once."""

    def __init__(
        self, models: Iterable[ServedModel], virtual: Mapping[str, VirtualModel] | None = None
    ) -> None:
        self._models = {model.name: model for model in models}
        self._virtual = virtual or {}
        self._adapters: Mapping[str, Mapping[str, NamedAdapter]] = {}
        self.on_adapters_changed: Callable[[], None] | None = None

    def serve(self, model: ServedModel) -> None:
        self._models[model.name] = model

    def serve_only(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def learn_context(self, name: str, tokens: int) -> None:
        """Store the context length that an upstream reports; of several replicas, the smallest."""
        model = self._models.get(name)
        if model is not None and tokens < model.context_length:
            self.serve(replace(model, context_length=tokens))

    def learn_kind(
        self, name: str, capabilities: frozenset[str], parameters: frozenset[str] | None
    ) -> None:
        """Store what the upstreams of a model can do, by what their pages say of them."""
        model = self._models.get(name)
        if model is not None:
            self.serve(replace(model, capabilities=capabilities, parameters=parameters))

    def set_adapters(self, adapters: Mapping[str, Mapping[str, NamedAdapter]]) -> None:
        self._adapters = adapters
        if self.on_adapters_changed is not None:
            self.on_adapters_changed()

    def models(self, principal: Principal) -> list[ServedModel]:
        allowed = principal.scopes.models
        return [m for m in self._models.values() if allowed is None or m.name in allowed]

    def virtual(self, principal: Principal) -> list[Target]:
        """The virtual models of which the key may use a model."""
        found = [self._of_pool(principal, each) for each in self._virtual.values()]
        return [each for each in found if each is not None]

    def _of_pool(self, principal: Principal, virtual: VirtualModel) -> Target | None:
        """With the first model of the pool that the key may use, for what needs no choice."""
        allowed = principal.scopes.models
        for each in virtual.members:
            model = self._models.get(each.model)
            if model is not None and (allowed is None or model.name in allowed):
                return Target(virtual.name, model, virtual=virtual)
        return None

    def served(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    def first(self) -> ServedModel:
        """The model for requests that name none, such as moderation calls."""
        return next(iter(self._models.values()))

    def only(self, principal: Principal) -> str:
        """The name of the one model that the key may use. Raises BadRequest where it may use others."""
        names = [model.name for model in self.models(principal)]
        if len(names) == 1:
            return names[0]
        raise BadRequest(
            f"model is missing, and this key may use {len(names)} models.",
            next_step="Name one of them; GET /v1/models lists them.",
            param="model",
            code="missing_required_parameter",
        )

    def adapters(self, principal: Principal) -> list[NamedAdapter]:
        own = self._adapters.get(principal.tenant_id, {}).values()
        return [a for a in own if _adapter_allowed(principal, a)]

    def names(self, tenant_id: str) -> list[str]:
        """Every model and adapter name of the tenant, before a key's scopes."""
        own = self._adapters.get(tenant_id, {}).values()
        return [*self._models, *self._virtual, *(f"{each.base_model}:{each.name}" for each in own)]

    def model_names(self) -> list[str]:
        return list(self._models)

    def every_adapter(self) -> Iterable[NamedAdapter]:
        """Those that may be used."""
        every = [each for own in self._adapters.values() for each in own.values()]
        return [each for each in every if not each.quarantined]

    def usable(self, digest: str) -> bool:
        return any(each.digest == digest for each in self.every_adapter())

    def quarantine(self, digest: str, reason: str) -> None:
        self.set_adapters(
            {
                tenant: {
                    name: replace(each, quarantined=reason) if each.digest == digest else each
                    for name, each in own.items()
                }
                for tenant, own in self._adapters.items()
            }
        )

    def resolve(self, principal: Principal, name: str) -> Target:
        """Resolve `<base>`, `<base>:<adapter>`, an adapter's own name or a virtual model."""
        own = self._adapters.get(principal.tenant_id, {})
        model = self._models.get(name)
        adapter = None
        if model is None and name in self._virtual:
            target = self._of_pool(principal, self._virtual[name])
            if target is None:
                raise self._unknown(principal, name)
            return target
        if model is None:
            base, colon, short = name.rpartition(":")
            adapter = own.get(name) or (own.get(short) if colon else None)
            if adapter is None or (colon and name != adapter.name and base != adapter.base_model):
                raise self._unknown(principal, name)
            model = self._models.get(adapter.base_model)
            if model is None:
                raise self._unknown(principal, name)
        if principal.scopes.models is not None and model.name not in principal.scopes.models:
            raise Forbidden(
                f"This key may not use the model {model.name}.",
                next_step="Use a key whose scopes include the model.",
                param="model",
            )
        if adapter is not None and not _adapter_allowed(principal, adapter):
            raise Forbidden(
                f"This key may not use the adapter {adapter.name}.",
                next_step="Use a key whose scopes include the adapter.",
                param="model",
            )
        if adapter is not None and adapter.quarantined:
            raise Forbidden(
                f"The adapter {adapter.name} is in quarantine: {adapter.quarantined}.",
                next_step="Remove it and upload other weights, or ask the operator to release it.",
                param="model",
                code="adapter_quarantined",
            )
        return Target(name, model, adapter)

    def _unknown(self, principal: Principal, name: str) -> ModelNotFound:
        known = [m.name for m in self.models(principal)]
        known += [each.public_name for each in self.virtual(principal)]
        known += [f"{a.base_model}:{a.name}" for a in self.adapters(principal)]
        listed = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
        return ModelNotFound(
            f"There is no model {name[:200]!r} for this key; it may use: {listed or 'none'}.",
            next_step="GET /v1/models lists them.",
            param="model",
        )


def _adapter_allowed(principal: Principal, adapter: NamedAdapter) -> bool:
    if principal.scopes.models is not None and adapter.base_model not in principal.scopes.models:
        return False
    return principal.scopes.adapters is None or adapter.name in principal.scopes.adapters
