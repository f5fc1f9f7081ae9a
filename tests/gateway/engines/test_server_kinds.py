"""A plain address of a server is enough: its pages name its kind and version, and what it can do."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import OpenAI

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from gateway.catalog.catalog import ServedModel
from gateway.catalog.upstreams import Upstream
from gateway.cli.doctor.upstream_flags import probe_servers
from gateway.engines import server_kinds
from gateway.engines.refusal_texts import client_text
from gateway.engines.server_kinds import Detected, detect, read_page
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
ANSWER = {
    "choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
Pages = dict[str, Any]


def models(owner: str, **fields: Any) -> Pages:
    entry = {"id": "far", "object": "model", "created": 1, "owned_by": owner, **fields}
    return {"/v1/models": {"object": "list", "data": [entry]}}


# The pages of each kind of server, in the shape that it has; a path that is not listed is 404 there.
VLLM = models("vllm", root="org/small", parent=None, max_model_len=2048, permission=[])
VLLM |= {"/version": {"version": "0.32.0"}, "/metrics": b"vllm:num_requests_running 0.0\n"}
OLD_VLLM = VLLM | {"/version": {"version": "0.8.5.post1"}}
SGLANG = models("sglang", root="org/small", parent=None, max_model_len=2048)
SGLANG |= {"/get_server_info": {"version": "0.5.23", "tool_call_parser": None, "tp_size": 1}}
LLAMA_CPP = models("llamacpp", meta={"n_ctx_train": 4096, "n_vocab": 32000})
LLAMA_CPP |= {
    "/props": {
        "default_generation_settings": {"n_ctx": 2048, "params": {}},
        "total_slots": 1,
        "modalities": {"vision": True, "audio": False},
        "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True},
        "build_info": "b8681-d4b0c22f",
    }
}
WITHOUT_TOOLS = LLAMA_CPP | {
    "/props": {"default_generation_settings": {"n_ctx": 2048}, "build_info": "b4000-1"}
}
TGI = models("org/small") | {
    "/info": {
        "model_id": "org/small",
        "max_concurrent_requests": 128,
        "max_input_tokens": 1023,
        "max_total_tokens": 1024,
        "version": "3.3.7",
        "router": "text-generation-router",
    }
}
OLLAMA = models("library") | {"/api/version": {"version": "0.12.3"}}
LM_STUDIO = models("organization_owner") | {
    "/api/v0/models": {
        "object": "list",
        "data": [{"id": "far", "type": "llm", "compatibility_type": "gguf", "state": "loaded"}],
    }
}
HOSTED = models("system")


def body_of(page: Any) -> bytes:
    return page if isinstance(page, bytes) else json.dumps(page).encode()


async def detected(pages: Pages, kind: str = "") -> Detected:
    async def _get(path: str) -> bytes:
        return body_of(pages[path]) if path in pages else b""

    return await detect(_get, await _get("/v1/models"), await _get("/metrics"), kind)


@pytest.mark.parametrize(
    ("pages", "kind", "version", "capabilities"),
    [
        (VLLM, "vllm", "0.32.0", {"tools", "json", "grammar"}),
        (OLD_VLLM, "vllm", "0.8.5.post1", {"tools", "json"}),
        (SGLANG, "sglang", "0.5.23", {"tools", "json"}),
        (LLAMA_CPP, "llama.cpp", "b8681-d4b0c22f", {"tools", "json", "images"}),
        (WITHOUT_TOOLS, "llama.cpp", "b4000-1", {"json"}),
        (TGI, "tgi", "3.3.7", {"tools"}),
        (OLLAMA, "ollama", "0.12.3", {"json"}),
        (LM_STUDIO, "lmstudio", "", {"json"}),
        (HOSTED, "", "", set()),
        (VLLM | models("tollhouse"), "", "", set()),  # its metrics have vLLM's names
        ({"/v1/models": b"<html>"}, "", "", set()),
        ({"/v1/models": b'{"data": [1, {"owned_by": ["vllm"]}]}'}, "", "", set()),
    ],
)
async def test_a_server_says_what_it_is(
    pages: Pages, kind: str, version: str, capabilities: set[str]
) -> None:
    found = await detected(pages)
    assert (found.kind, found.version, found.capabilities) == (kind, version, capabilities)


async def test_the_metrics_name_a_server_whose_models_do_not() -> None:
    assert (await detected(VLLM | models("acme"))).kind == "vllm"


async def test_a_declared_kind_is_believed() -> None:
    assert (await detected(HOSTED, "vllm")).capabilities == {"tools", "json", "grammar"}


@pytest.fixture
def server() -> Iterator[Server]:
    with upstream() as made:
        made.only_pages = True
        made.also = frozenset(("top_k", "cache_salt", "repeat_penalty"))
        made.answers[PATH] = ANSWER
        yield made


def gateway(server: Server, path: Path, **more: Any) -> Any:
    entry = {"url": server.url, "name": "u", "model": "far", **more}
    return running_deployment(path, settings={"upstreams": json.dumps([entry])}, engines=None)


def priced(made: Deployment) -> OpenAI:
    with made.services.database.transaction() as session:
        ensure_default_prices(session, SystemClock(), "far")
    made.services.prices.refresh()
    return OpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0, timeout=60)


def until(made: Deployment, true: Callable[[ServedModel], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true(made.services.catalog.first()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ask(client: OpenAI, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(model="far", messages=messages, **more)


def test_a_plain_address_of_vllm_is_enough(server: Server, tmp_path: Path) -> None:
    server.pages |= VLLM
    with gateway(server, tmp_path) as made, priced(made) as client:
        until(made, lambda model: "grammar" in model.capabilities)
        ask(client, response_format={"type": "json_schema", "json_schema": SCHEMA})
        ask(client, tools=[TOOL], tool_choice="required")
        ask(client, extra_body={"top_k": 5})
        assert server.asked[-1][1]["top_k"] == 5
        assert server.asked[-1][1]["cache_salt"], "tenants are kept apart in its prefix cache"


def test_what_an_entry_declares_is_not_looked_up(server: Server, tmp_path: Path) -> None:
    server.pages |= VLLM
    with gateway(server, tmp_path, capabilities=["json"]) as made, priced(made) as client:
        until(made, lambda model: "top_k" in (model.parameters or ()))
        with pytest.raises(openai.BadRequestError):
            ask(client, tools=[TOOL], tool_choice="required")


def test_a_server_that_says_nothing_is_asked_for_text_alone(server: Server, tmp_path: Path) -> None:
    server.pages |= HOSTED
    with gateway(server, tmp_path) as made, priced(made) as client:
        with pytest.raises(openai.BadRequestError):
            ask(client, tools=[TOOL], tool_choice="required")
        assert ask(client).choices[0].message.content == "yes"


REFUSAL = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'


@pytest.mark.parametrize(
    ("pages", "declared", "reads"),
    [(VLLM, None, True), (VLLM, False, False), (HOSTED, None, False), (HOSTED, True, True)],
)
def test_its_text_of_a_refusal_reaches_the_client(
    server: Server, tmp_path: Path, pages: Pages, declared: bool | None, reads: bool
) -> None:
    server.pages |= pages
    server.statuses[PATH] = 400
    server.answers[PATH] = {"error": {"message": f"{REFUSAL} at 10.1.2.3:8000", "code": 400}}
    more = {} if declared is None else {"error_text": declared}
    with gateway(server, tmp_path, **more) as made, priced(made) as client:
        if pages is VLLM:
            until(made, lambda model: "grammar" in model.capabilities)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client)
    assert caught.value.code == "upstream_refused"
    assert (REFUSAL in caught.value.message) is reads
    assert "10.1.2.3" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://gpu-1.internal:8000/v1?key=abc now", "see [removed] now"),
        ("no route to gpu-7:8000", "no route to [removed]"),
        ("host gpu-7.cluster.local is full", "host [removed] is full"),
        ("from fe80::1ff:fe23:4567:890a", "from [removed]"),
        ("key sk-abcdefgh12345678 is bad", "key [removed] is bad"),
        ("the key s3cret is bad", "the key [removed] is bad"),
        ("Authorization: Bearer abc", "Authorization: [removed]"),
        ("cannot read /srv/models/a/config.json", "cannot read [removed]"),
        (r"cannot read C:\models\a.gguf", "cannot read [removed]"),
        ("id 0123456789abcdef0123456789abcdef", "id [removed]"),
        ("top_k must be -1 or 0.5 <= x, got 3/4", "top_k must be -1 or 0.5 <= x, got 3/4"),
        ("vLLM 0.32.0: use --enable-tokenizer-info-endpoint", None),
        ("two\nlines\x07", "two lines"),
    ],
)
def test_secrets_and_addresses_are_removed(text: str, shown: str | None) -> None:
    assert client_text({"message": text}, ["s3cret"]) == (text if shown is None else shown)


def test_a_text_is_short() -> None:
    assert len(client_text("word " * 10_000)) <= 300
    assert client_text({"nothing": 1}) == client_text(None) == ""


async def probed(server: Server, pages: Pages) -> str:
    server.pages = pages
    (probe,) = await probe_servers([Upstream(server.url, model="far")])
    return "; ".join(probe.lacks)


async def test_the_doctor_names_the_flags_of_vllm(server: Server) -> None:
    assert "--enable-prompt-tokens-details" in await probed(server, VLLM)
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    server.answers[PATH] = ANSWER | {"usage": USAGE | details}
    assert await probed(server, VLLM) == ""
    server.statuses[PATH] = 400
    server.answers[PATH] = {"error": {"message": REFUSAL, "code": 400}}
    assert "--enable-auto-tool-choice" in await probed(server, VLLM)


async def test_the_doctor_names_the_flags_of_others(server: Server) -> None:
    assert "--tool-call-parser" in await probed(server, SGLANG)
    assert "--metrics" in await probed(server, LLAMA_CPP)
    assert "--jinja" in await probed(server, WITHOUT_TOOLS)
    assert await probed(server, OLLAMA) == await probed(server, HOSTED) == ""
    assert not [path for path, _ in server.asked], "only vLLM's flags take a request"


async def test_a_page_of_any_size_is_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_kinds, "MAX_PAGE_BYTES", 1 << 20)
    small, large = b"x" * (1 << 20), b"x" * ((1 << 20) + 1)
    server.pages = {"/small": small, "/large": large}
    async with aiohttp.ClientSession() as session:
        for path, page in (("/small", small), ("/large", None)):
            async with session.get(server.url + path) as answer:
                assert await read_page(answer) == page
    lacks = await probed(server, models("vllm") | {"/metrics": large, "/version": {"version": "1"}})
    assert "/metrics has more than" in lacks, lacks
