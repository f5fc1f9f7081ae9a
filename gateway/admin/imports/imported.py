"""What an import makes of another gateway's configuration, and what has no counterpart."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from core.errors import BadRequest
from gateway.catalog.upstreams import read_upstreams
from gateway.catalog.virtual_models import read_virtual_models

_MOST_BYTES = 16 << 20
_SECRETS = ("api_key", "client_secret")
_ENVIRONMENT = "os.environ/"
# Names of providers elsewhere -> ours.
PROVIDERS = {
    "openai": "openai",
    "azure": "azure",
    "azure-openai": "azure",
    "anthropic": "anthropic",
    "gemini": "gemini",
    "google": "gemini",
    "vertex_ai": "vertex",
    "vertex-ai": "vertex",
    "bedrock": "bedrock",
    "mistral": "mistral",
    "mistral-ai": "mistral",
    "cohere": "cohere",
    "cohere_chat": "cohere",
    "groq": "groq",
    "together_ai": "together",
    "together-ai": "together",
    "fireworks_ai": "fireworks",
    "fireworks-ai": "fireworks",
    "deepseek": "deepseek",
    "xai": "xai",
    "x-ai": "xai",
    "openrouter": "openrouter",
}


@dataclass(slots=True)
class Imported:
    upstreams: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: dict[str, list[str]] = field(default_factory=dict)
    virtual_models: dict[str, Any] = field(default_factory=dict)
    budgets: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # each with its place and the reason

    def leave_out(self, place: str, why: str) -> None:
        self.left_out.append(f"{place}: {why}")

    def secret_of(self, given: object, place: str) -> str:
        """The secret, from the environment where it is named there; empty, and said, without one."""
        text = given if isinstance(given, str) else ""
        name = text.removeprefix(_ENVIRONMENT) if text.startswith(_ENVIRONMENT) else ""
        if text.startswith("${") and text.endswith("}"):
            name = text[2:-1]
        if not name:
            return text
        if not (found := os.environ.get(name, "")):
            self.leave_out(place, f"the variable {name} is not set here, so its entry has none")
        return found

    def checked(self) -> "Imported":
        """Raises SettingError where the gateway would not start with it."""
        whole = [
            {"api_key": "-"} | each if each.get("provider") else each for each in self.upstreams
        ]
        read_upstreams(json.dumps(whole))
        read_virtual_models(json.dumps(self.virtual_models))
        return self

    def shown(self) -> dict[str, Any]:
        """Without secrets."""
        hidden = [
            {name: "…" if name in _SECRETS and value else value for name, value in each.items()}
            for each in self.upstreams
        ]
        return {
            "upstreams": hidden,
            "fallbacks": self.fallbacks,
            "virtual_models": self.virtual_models,
            "budgets": self.budgets,
            "left_out": self.left_out,
        }


def document_of(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that is a mapping."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadRequest(f"{path} is larger than {_MOST_BYTES >> 20} MiB.")
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise BadRequest(f"{path} is not YAML: {reason}.", next_step="Correct it.") from None
    if not isinstance(given, dict):
        raise BadRequest(f"{path} is not a mapping.", next_step="Give a configuration file.")
    return given


def with_names(upstreams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with a name of its own, since several may have one address and model."""
    seen: dict[str, int] = {}
    found = []
    for each in upstreams:
        base = f"{each.get('provider') or each.get('engine') or 'server'}:{each['model']}"
        seen[base] = seen.get(base, 0) + 1
        found.append({"name": base if seen[base] == 1 else f"{base}:{seen[base]}", **each})
    return found


def shares_of(weights: list[int]) -> list[int | None]:
    """Percents of conversations; None for the heaviest, which gets the rest."""
    whole, most = sum(weights), weights.index(max(weights))
    return [None if at == most else each * 100 // whole for at, each in enumerate(weights)]


def mapping(given: object) -> Mapping[str, Any]:
    return given if isinstance(given, dict) else {}
