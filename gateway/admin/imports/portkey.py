"""A configuration of Portkey's gateway: a strategy over targets, as one virtual model."""

from pathlib import Path
from typing import Any

from core.errors import BadRequest
from gateway.admin.imports.imported import PROVIDERS, Imported, document_of, mapping, with_names

_MODES = {"fallback": "ordered", "loadbalance": "weighted", "single": "ordered"}
_READ = {"provider", "api_key", "weight", "override_params", "custom_host"}
_WHY = {
    "virtual_key": "Portkey holds its secret: give the provider's own as api_key",
    "retry": "a failed request goes on to the pool's next model",
    "cache": "a tenant turns its response cache on",
}


def read(path: Path, name: str) -> Imported:
    """`name` is the virtual model's. BadRequest for a file that is no such configuration."""
    given, made = document_of(path), Imported()
    mode = mapping(given.get("strategy")).get("mode", "single")
    targets = given.get("targets", [given] if "provider" in given else None)
    if not isinstance(targets, list) or mode not in _MODES:
        raise BadRequest(
            f"{path} has no targets of the strategies {', '.join(_MODES)}.",
            next_step="Give a configuration of Portkey as JSON; conditions are written by hand.",
        )
    members: list[dict[str, Any]] = []
    for at, each in enumerate(targets):
        target, place = mapping(each), f"targets[{at}]"
        provider = PROVIDERS.get(str(target.get("provider", "")).removeprefix("@"))
        model = mapping(target.get("override_params")).get("model")
        if (
            provider is None
            or not isinstance(model, str)
            or provider in ("azure", "bedrock", "vertex")
        ):
            made.leave_out(place, "its provider or model is not said, or needs options of its own")
            continue
        entry = {"provider": provider, "model": f"{name}-{at + 1}", "upstream_model": model}
        if key := made.secret_of(target.get("api_key"), f"{place}.api_key"):
            entry["api_key"] = key
        if isinstance(target.get("custom_host"), str):
            entry["url"] = target["custom_host"]
        made.upstreams.append(entry)
        weight = target.get("weight", 1)
        permille = round(weight * 1000) if type(weight) in (int, float) else 0
        members.append({"model": entry["model"], "weight": max(1, permille)})
        for field in target.keys() - _READ:
            made.leave_out(f"{place}.{field}", _WHY.get(field, "no counterpart"))
        for field in mapping(target.get("override_params")).keys() - {"model"}:
            made.leave_out(f"{place}.override_params.{field}", "clients send it themselves")
    for field in given.keys() - _READ - {"strategy", "targets"}:
        made.leave_out(field, _WHY.get(field, "no counterpart"))
    made.upstreams = with_names(made.upstreams)
    if members:
        made.virtual_models[name] = {"choose": _MODES[mode], "models": members}
    return made.checked()
