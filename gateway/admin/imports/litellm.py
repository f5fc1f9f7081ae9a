"""A configuration of LiteLLM's proxy."""

import json
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from billing.pricing import price_lists
from core.errors import BadRequest
from gateway.admin.imports.imported import (
    PROVIDERS,
    Imported,
    document_of,
    mapping,
    shares_of,
    with_names,
)

# Servers with an address of their own -> our `engine`.
_SERVERS = {
    "hosted_vllm": "vllm",
    "vllm": "vllm",
    "ollama": "ollama",
    "ollama_chat": "ollama",
    "lm_studio": "lmstudio",
    "llamafile": "llama.cpp",
    "openai_like": "",
    "custom_openai": "",
}
_USUAL_URLS = {"ollama": "http://127.0.0.1:11434", "lmstudio": "http://127.0.0.1:1234"}
_OPTIONS = {
    "azure": {"api_version": "api_version", "tenant_id": "tenant", "client_id": "client_id"},
    "bedrock": {"aws_region_name": "region", "aws_profile_name": "profile"},
    "vertex": {
        "vertex_project": "project",
        "vertex_location": "location",
        "vertex_credentials": "credentials",
    },
}
_NUMBERS = {"rpm": "requests_per_minute", "max_parallel_requests": "max_in_flight"}
_READ = {
    *("model", "api_key", "api_base", "base_url", "weight", "custom_llm_provider", "region_name"),
    *_NUMBERS,
}
_WINDOWS = {
    "1d": "day",
    "24h": "day",
    "7d": "week",
    "1w": "week",
    "30d": "month",
    "1mo": "month",
    "31d": "month",
}
_WHY = {
    "tpm": "limits of tokens are learned from the provider's headers, or set with `tollhouse limit`",
    "master_key": "make a key with `tollhouse key new`; the operator's is TOLLHOUSE_ADMIN_TOKEN",
    "database_url": "set TOLLHOUSE_DATABASE_URL; keys and spend of the old database are not read",
    "context_window_fallbacks": "a virtual model with `tokens_from` chooses by the prompt's size",
    "cache": "a tenant turns its response cache on",
    "num_retries": "a failed request goes on to another replica or fallback model",
}


def read(path: Path) -> Imported:
    """BadRequest for a file that is no such configuration."""
    given, made = document_of(path), Imported()
    listed = given.get("model_list")
    if not isinstance(listed, list):
        raise BadRequest(
            f"{path} has no model_list, so it is not a configuration of LiteLLM.",
            next_step="Give the file of its --config.",
        )
    weights: dict[int, int] = {}
    for at, each in enumerate(listed):
        entry = _entry_of(mapping(each), f"model_list[{at}]", made)
        if entry is not None:
            weight = mapping(mapping(each).get("litellm_params")).get("weight")
            if type(weight) is int and weight > 0:
                weights[len(made.upstreams)] = weight
            elif weight is not None:
                where = f"model_list[{at}].litellm_params.weight"
                made.leave_out(where, "it is not a whole number above 0")
            made.upstreams.append(entry)
    _weigh(made.upstreams, weights)
    _agree_on_prices(made)
    made.upstreams = with_names(made.upstreams)
    _routing(given, made)
    _others(given, made)
    return made.checked()


def _entry_of(given: Mapping[str, Any], place: str, made: Imported) -> dict[str, Any] | None:
    params, public = mapping(given.get("litellm_params")), given.get("model_name")
    model = params.get("model")
    if not isinstance(public, str) or not isinstance(model, str) or not public or not model:
        made.leave_out(place, "it has no model_name or no litellm_params.model")
        return None
    if "*" in public + model:
        made.leave_out(place, f"{public!r} is a pattern: name each model")
        return None
    prefix, _, rest = model.partition("/")
    known = prefix in PROVIDERS or prefix in _SERVERS
    kind = params.get("custom_llm_provider") or (prefix if known else _kind_of(model))
    name = rest if known and rest else model
    url = params.get("api_base") or params.get("base_url") or ""
    entry: dict[str, Any] = {"model": public, "upstream_model": name}
    if kind in _SERVERS or (kind == "openai" and url and "api.openai.com" not in url):
        engine = _SERVERS.get(kind, "")
        entry |= {"url": url or _USUAL_URLS.get(engine, ""), "engine": engine}
        if not entry["url"]:
            made.leave_out(place, f"{model} has no api_base")
            return None
        entry = {key: value for key, value in entry.items() if value}
    elif kind in PROVIDERS:
        entry |= _provider_fields(PROVIDERS[kind], params, name)
        if url and PROVIDERS[kind] not in ("openai", "vertex"):
            entry["url"] = url
        if PROVIDERS[kind] in ("bedrock", "vertex") and _lacks(entry):
            made.leave_out(place, f"{model} has no region, project or location")
            return None
        if entry["provider"] == "azure" and not url:
            made.leave_out(place, f"{model} has no api_base")
            return None
    else:
        made.leave_out(place, f"{model} is of a provider that has no port here")
        return None
    if key := made.secret_of(params.get("api_key"), f"{place}.litellm_params.api_key"):
        entry["api_key"] = key
    for theirs, ours in _NUMBERS.items():
        if type(params.get(theirs)) is int and params[theirs] > 0:
            entry[ours] = params[theirs]
        elif params.get(theirs) is not None:
            made.leave_out(f"{place}.litellm_params.{theirs}", "it is not a whole number above 0")
    if isinstance(params.get("region_name"), str):
        entry["region"] = params["region_name"]
    info = mapping(given.get("model_info"))
    if price := _price_of(public, {**info, **params}, place, made):
        entry["price"] = price
    mapped = set(_OPTIONS.get(entry.get("provider", "").partition("-")[0], ()))
    for field in params.keys() - _READ - mapped:
        if "cost" not in field:
            made.leave_out(f"{place}.litellm_params.{field}", _WHY.get(field, "no counterpart"))
    return entry


def _kind_of(model: str) -> str:
    """Of a name without a provider, as LiteLLM knows it."""
    if model.startswith(("gpt-", "o1", "o3", "o4", "chatgpt-", "text-embedding-")):
        return "openai"
    return "anthropic" if model.startswith("claude-") else ""


def _provider_fields(provider: str, params: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"provider": provider}
    given = {
        ours: params[theirs]
        for theirs, ours in _OPTIONS.get(provider, {}).items()
        if isinstance(params.get(theirs), str) and params[theirs]
    }
    if provider == "vertex" and name.startswith("claude"):
        fields["provider"] = "vertex-anthropic"
    if provider == "bedrock":
        fields["upstream_model"] = name.removeprefix("converse/").removeprefix("invoke/")
    return fields | ({"options": given} if given else {})


def _lacks(entry: Mapping[str, Any]) -> bool:
    wanted = ("region",) if entry["provider"] == "bedrock" else ("project", "location")
    return any(each not in entry.get("options", {}) for each in wanted)


def _price_of(
    public: str, given: Mapping[str, Any], place: str, made: Imported
) -> dict[str, Any] | None:
    costs = {name: value for name, value in given.items() if "cost" in name}
    if not costs:
        return None
    try:
        # A float's own digits are read and never rounded.
        numbers = [f"{json.dumps(k)}: {Decimal(str(v)):f}" for k, v in costs.items()]
        text = f"{{{json.dumps(public)}: {{{', '.join(numbers)}}}}}"
        rows = {each.model: each for each in price_lists.parse(text)}
        if any(Decimal(str(each)) < 0 for each in costs.values()):
            raise ValueError("a cost is negative")
    except (InvalidOperation, ValueError, BadRequest):
        made.leave_out(f"{place}.litellm_params", "its costs cannot be read as prices")
        return None
    found = rows.get(public)
    if found is None:
        return None
    for field in found.left_out:
        made.leave_out(f"{place}.litellm_params.{field}", "no price of ours has it")
    return dict(found.rates)


def _weigh(upstreams: list[dict[str, Any]], weights: Mapping[int, int]) -> None:
    groups: dict[str, list[int]] = {}
    for at in weights:
        groups.setdefault(upstreams[at]["model"], []).append(at)
    for places in groups.values():
        if len(places) > 1:
            shares = shares_of([weights[at] for at in places])
            for at, share in zip(places, shares, strict=True):
                if share is not None:
                    upstreams[at]["canary_percent"] = share


def _agree_on_prices(made: Imported) -> None:
    """Clients pay one price for a model, whichever entry answers."""
    first: dict[str, Any] = {}
    for each in made.upstreams:
        price = each.get("price")
        if price and first.setdefault(each["model"], price) != price:
            del each["price"]
            made.leave_out(each["model"], "its entries have several prices; the first holds")


def _routing(given: Mapping[str, Any], made: Imported) -> None:
    router = mapping(given.get("router_settings"))
    settings = mapping(given.get("litellm_settings"))
    served = list(dict.fromkeys(each["model"] for each in made.upstreams))
    for alias, value in mapping(router.get("model_group_alias")).items():
        target = value.get("model") if isinstance(value, dict) else value
        place = f"router_settings.model_group_alias.{alias}"
        if target not in served:
            made.leave_out(place, f"there is no model {target!r}")
        elif alias in served:
            made.leave_out(place, "a model has this name")
        else:
            made.virtual_models[alias] = target
    for where, source in (("router_settings", router), ("litellm_settings", settings)):
        for each in source.get("fallbacks") or ():
            for model, after in mapping(each).items():
                _chain(f"{where}.fallbacks.{model}", model, after, made)
    default = settings.get("default_fallbacks") or router.get("default_fallbacks")
    if isinstance(default, list):
        for model in served:
            others = [each for each in default if each != model]
            if model not in made.fallbacks and others:
                _chain(f"default_fallbacks of {model}", model, others, made)


def _chain(place: str, model: str, after: object, made: Imported) -> None:
    served = {each["model"] for each in made.upstreams}
    names = after if isinstance(after, list) else [after]
    plain = [made.virtual_models.get(each, each) if isinstance(each, str) else "" for each in names]
    found = [each for each in plain if each in served]
    missing = [each for each in names if made.virtual_models.get(str(each), each) not in served]
    if missing or model not in served:
        made.leave_out(place, f"there is no model {(missing or [model])[0]!r}")
    if model in served and found:
        made.fallbacks[model] = found


def _others(given: Mapping[str, Any], made: Imported) -> None:
    settings = mapping(given.get("litellm_settings"))
    cap, duration = settings.get("max_budget"), settings.get("budget_duration")
    read = {"fallbacks", "default_fallbacks", "model_group_alias"}
    if isinstance(cap, int | float) and not isinstance(cap, bool) and cap > 0:
        window = _WINDOWS.get(str(duration)) if duration is not None else "total"
        if window is not None:
            made.budgets.append(
                {"name": "imported", "cap": str(Decimal(str(cap))), "window": window}
            )
            read |= {"max_budget", "budget_duration"}
    for where in ("litellm_settings", "router_settings", "general_settings"):
        for field in mapping(given.get(where)):
            if field not in read:
                made.leave_out(f"{where}.{field}", _WHY.get(field, "no counterpart"))
    known = {"model_list", "litellm_settings", "router_settings", "general_settings"}
    for field in given.keys() - known:
        made.leave_out(field, "no counterpart")
