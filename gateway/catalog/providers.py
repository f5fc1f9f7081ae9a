"""The providers of models that have a port of their own, by the name in an upstream's `provider`.

An entry with a provider may leave its `url` out where the provider has one address.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Provider:
    url: str = ""  # its public address; empty where each customer has one
    options: frozenset[str] = frozenset()  # fields of an entry's `options`
    required: frozenset[str] = frozenset()  # those of them that an entry must have
    keyless: bool = False  # credentials may come from elsewhere than `api_key`

    def address(self, options: Mapping[str, Any]) -> str:
        """The address, with the places that these options name; empty where it cannot be known."""
        return self.url.format_map(options) if self.required <= options.keys() else ""


_GOOGLE = "https://{location}-aiplatform.googleapis.com"
_VERTEX = frozenset(("project", "location", "credentials"))
PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        "anthropic": Provider(
            "https://api.anthropic.com",
            frozenset(("version", "beta", "max_tokens", "thinking")),
        ),
        "gemini": Provider("https://generativelanguage.googleapis.com", frozenset(("version",))),
        "vertex": Provider(_GOOGLE, _VERTEX, frozenset(("project", "location")), keyless=True),
        "vertex-anthropic": Provider(
            _GOOGLE,
            _VERTEX | {"max_tokens", "thinking"},
            frozenset(("project", "location")),
            keyless=True,
        ),
        "bedrock": Provider(
            "https://bedrock-runtime.{region}.amazonaws.com",
            frozenset(("region", "profile", "thinking", "guardrail", "guardrail_version")),
            frozenset(("region",)),
            keyless=True,
        ),
        "azure": Provider(
            "",
            frozenset(
                ("api_version", "tenant", "client_id", "client_secret", "authority", "scope")
            ),
            keyless=True,
        ),
        "cohere": Provider("https://api.cohere.com"),
        "openai": Provider("https://api.openai.com"),
        "openai-responses": Provider("https://api.openai.com", frozenset(("path",))),
        "mistral": Provider("https://api.mistral.ai"),
        "groq": Provider("https://api.groq.com"),
        "together": Provider("https://api.together.xyz"),
        "fireworks": Provider("https://api.fireworks.ai"),
        "deepseek": Provider("https://api.deepseek.com"),
        "xai": Provider("https://api.x.ai"),
        "openrouter": Provider("https://openrouter.ai"),
    }
)


def problem_with_options(name: str, options: Any) -> str:
    """What is wrong with the options of an entry of this provider; empty if nothing is."""
    provider = PROVIDERS[name]
    if not isinstance(options, dict):
        return "options is not an object"
    for option in options.keys() - provider.options:
        known = ", ".join(sorted(provider.options)) or "none"
        return f"options has the unknown field {option!r}; {name} has {known}"
    for option in sorted(provider.required - options.keys()):
        return f"options.{option} is missing, which {name} needs"
    for option, value in options.items():
        if not isinstance(value, str | int | bool) or value == "":
            return f"options.{option} is {value!r}, not a text, number or truth value"
    return ""
