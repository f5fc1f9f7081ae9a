"""What kind of server an OpenAI-compatible upstream is, by its own pages, and what such a server does.

An entry that gives a plain address is enough: the pages name the kind and the version, and the table
below says which capabilities such a server has. What the entry declares itself is not looked up.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

MAX_PAGE_BYTES = 8 << 20  # of metrics of many adapters; lists of models are far smaller
GetPage = Callable[[str], Awaitable[bytes]]  # the page's body; empty without one

VLLM, SGLANG, LLAMA_CPP, TGI, OLLAMA, LM_STUDIO = (
    "vllm",
    "sglang",
    "llama.cpp",
    "tgi",
    "ollama",
    "lmstudio",
)
_OWNERS = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP}  # `owned_by` in /v1/models
OWN = "tollhouse"  # `owned_by` of our models
_METRICS = {"vllm:": VLLM, "sglang:": SGLANG, "llamacpp:": LLAMA_CPP, "tgi_": TGI}
_VERSION_PAGES = {VLLM: "/version", SGLANG: "/get_server_info", LLAMA_CPP: "/props"}
_NONE: frozenset[str] = frozenset()
# (kind, the first version that has them, capabilities). Later rows of a kind add to earlier ones.
# vLLM takes `structured_outputs` since 0.11; before, it had the field `guided_json` and its like.
# Ollama and LM Studio ignore a `tool_choice`, so they have no `tools`.
_CAPABILITIES: tuple[tuple[str, tuple[int, ...], frozenset[str]], ...] = (
    (VLLM, (), frozenset(("json", "tools"))),
    (VLLM, (0, 11), frozenset(("grammar",))),
    (SGLANG, (), frozenset(("json", "tools"))),
    (LLAMA_CPP, (), frozenset(("json",))),
    (TGI, (), frozenset(("tools",))),
    (OLLAMA, (0, 5), frozenset(("json",))),
    (LM_STUDIO, (), frozenset(("json",))),
)
# Kinds that write the text of a refusal about the request alone, so that its client may read it.
SHOWN = frozenset((VLLM, SGLANG, LLAMA_CPP, TGI))


async def read_page(answer: aiohttp.ClientResponse) -> bytes | None:
    """The answer's body. None beyond `MAX_PAGE_BYTES`, of which the rest is not read: a server decides
    what it sends, and must not fill this process."""
    page = bytearray()
    async for piece in answer.content.iter_any():
        page += piece
        if len(page) > MAX_PAGE_BYTES:
            answer.close()
            return None
    return bytes(page)


@dataclass(frozen=True, slots=True)
class Detected:
    """`kind` is empty for a server that says nothing of itself. `page` is what its settings page says:
    SGLang's /get_server_info, llama.cpp's /props, else empty."""

    kind: str = ""
    version: str = ""
    capabilities: frozenset[str] = frozenset()
    page: Mapping[str, Any] = field(default_factory=dict)


async def detect(get: GetPage, models: bytes, metrics: bytes, kind: str = "") -> Detected:
    """By the pages that were read already, then by others of the server. `kind`: declared, if it is."""
    kind = kind or _kind_of(models, metrics)
    page: dict[str, Any] = {}
    if not kind:
        kind, page = await _by_own_page(get)
    elif kind in _VERSION_PAGES:
        page = json_object(await get(_VERSION_PAGES[kind]))
    version = str(page.get("version") or page.get("build_info") or "")[:60]
    found = capabilities_of(kind, version) | (_of_props(page) if kind == LLAMA_CPP else _NONE)
    return Detected(kind, version, found, page)


def capabilities_of(kind: str, version: str) -> frozenset[str]:
    """Without a version, those of the kind's newest: the servers in use are younger than the rows."""
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:3])
    rows = [names for name, _, names in _CAPABILITIES if name == kind]
    if numbers and kind != LLAMA_CPP:  # its builds are numbered
        rows = [names for name, since, names in _CAPABILITIES if name == kind and since <= numbers]
    return frozenset().union(*rows)


def _kind_of(models: bytes, metrics: bytes) -> str:
    listed = json_object(models).get("data")
    entries = (
        [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    )
    named = {_OWNERS[owner] for each in entries if (owner := str(each.get("owned_by"))) in _OWNERS}
    if len(named) == 1:
        return named.pop()
    if any(each.get("owned_by") == OWN for each in entries):
        return ""  # another gateway of ours, whose engines have vLLM's names of metrics
    text = metrics.decode("utf-8", "replace")
    return next((kind for head, kind in _METRICS.items() if f"\n{head}" in f"\n{text}"), "")


async def _by_own_page(get: GetPage) -> tuple[str, dict[str, Any]]:
    """Each page has fields that no other server's page of that path has."""
    page = json_object(await get("/props"))
    if "default_generation_settings" in page:
        return LLAMA_CPP, page
    page = json_object(await get("/info"))
    if "model_id" in page and "max_concurrent_requests" in page:
        return TGI, page
    page = json_object(await get("/api/v0/models"))
    listed = page.get("data")
    if isinstance(listed, list) and any(
        isinstance(each, dict) and "compatibility_type" in each for each in listed
    ):
        return LM_STUDIO, {}
    page = json_object(await get("/api/version"))
    return (OLLAMA, page) if page.keys() == {"version"} else ("", {})


def _of_props(page: dict[str, Any]) -> frozenset[str]:
    """llama.cpp says what its model's template and projector can do."""
    modalities, caps = page.get("modalities"), page.get("chat_template_caps")
    modalities = modalities if isinstance(modalities, dict) else {}
    caps = caps if isinstance(caps, dict) else {}
    has = {
        "tools": caps.get("supports_tools") is True,
        "images": modalities.get("vision") is True,
        "audio": modalities.get("audio") is True,
    }
    return frozenset(name for name, there in has.items() if there)


def json_object(page: bytes) -> dict[str, Any]:
    """The page's JSON object; empty if it is none."""
    try:
        value = orjson.loads(page)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
