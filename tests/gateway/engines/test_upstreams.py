"""Servers that are not ours, each one entry of TOLLHOUSE_UPSTREAMS: what they are asked, what they
are refused, what they cost, and how their own pages feed the router."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from billing.pricing.prices import ensure_default_prices, ensure_price
from core.clock import FakeClock, SystemClock
from core.counters_redis import RedisCounters
from core.errors import SettingError, TollhouseError
from core.settings import Settings
from engine.demo.paths import MODEL_DIR
from engine.protocol import GenerateRequest, SamplingParams
from gateway.answers import delivery
from gateway.catalog.upstreams import Upstream, read_upstreams
from gateway.engines.clients import make_engines
from gateway.engines.openai import OpenAIEngine
from gateway.engines.openai_body import lora_name, upstream_body
from gateway.engines.openai_stats import stats_of
from gateway.engines.upstream_limits import UpstreamLimits
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.migrated import migrated

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1000.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 10.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 5.0
"""


class Server:
    """A small OpenAI-compatible server with vLLM's adapter endpoints and metrics."""

    metrics = ""  # a page that names no kind of server

    def __init__(self, hold_s: float = 0.0, usage_after_s: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.adapters: list[str] = []
        self.hold_s = hold_s
        self.usage_after_s = usage_after_s
        self.url = ""
        self.app = web.Application()
        self.app.router.add_post("/v1/chat/completions", self._complete)
        self.app.router.add_post("/v1/load_lora_adapter", self._load)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/metrics", self._metrics)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.hold_s)
        usage = {
            "prompt_tokens": 21,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        if not body["stream"]:
            message = {"role": "assistant", "content": "a b"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for text, reason in (("a", None), (" b", "stop")):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if body.get("stream_options", {}).get("include_usage"):
            await asyncio.sleep(self.usage_after_s)
            last = json.dumps({"choices": [], "usage": usage}).encode()
            await answer.write(b"data: " + last + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.adapters.append(body["lora_name"])
        return web.Response(text="Success: LoRA adapter added successfully.")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ["m", *self.adapters]]})


@contextmanager
def running(server: Server) -> Iterator[Server]:
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def _serve() -> None:
        runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore
        ready.set()
        while not over.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    over = threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    yield server
    over.set()
    thread.join(10)
    loop.close()


@contextmanager
def deployment_of(tmp_path: Path, *entries: dict[str, Any]) -> Iterator[Deployment]:
    full = [{"model": MODEL, "tokenizer": str(MODEL_DIR), **each} for each in entries]
    settings = {"upstreams": json.dumps(full)}
    with running_deployment(tmp_path, engines=None, settings=settings) as deployment:
        yield deployment


def ask(deployment: Deployment, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body | more, headers=deployment.headers, timeout=60)


def test_usage_is_asked_for_on_every_stream_and_hidden_from_who_did_not_ask(tmp_path: Path) -> None:
    with running(Server()) as server, deployment_of(tmp_path, {"url": server.url}) as deployment:
        silent = ask(deployment, stream=True)
        assert server.bodies[-1]["stream_options"] == {"include_usage": True}
        assert '"usage":{' not in silent.text and "[DONE]" in silent.text
        told = ask(deployment, stream=True, stream_options={"include_usage": True})
        assert '"cached_tokens":16' in told.text
        assert ask(deployment).json()["usage"]["prompt_tokens"] == 21
        counts = {
            (e["input_tokens"], e["cached_tokens"], e["output_tokens"])
            for e in deployment.events(3)
        }
        assert counts == {(21, 16, 2)}, "streamed or whole, the bill is the same"


def test_usage_that_comes_long_after_the_last_word_is_still_the_bill(tmp_path: Path) -> None:
    with (
        running(Server(usage_after_s=0.3)) as server,
        deployment_of(tmp_path, {"url": server.url}) as deployment,
    ):
        told = ask(deployment, stream=True, stream_options={"include_usage": True})
        assert '"cached_tokens":16' in told.text
        (event,) = deployment.events(1)
        assert (event["input_tokens"], event["cached_tokens"], event["output_tokens"]) == (
            21,
            16,
            2,
        )


def test_a_server_that_never_tells_its_usage_is_let_go_and_billed_as_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "RECEIPT_WAIT_S", 0.2)
    with (
        running(Server(usage_after_s=60.0)) as server,
        deployment_of(tmp_path, {"url": server.url}) as deployment,
    ):
        began = time.monotonic()
        told = ask(deployment, stream=True, stream_options={"include_usage": True})
        assert "[DONE]" in told.text and time.monotonic() - began < 40
        (event,) = deployment.events(1)
        assert event["cached_tokens"] == 0 and event["output_tokens"] == 2


def test_a_parameter_that_an_upstream_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with running(Server()) as server, deployment_of(tmp_path, {"url": server.url}) as deployment:
        refused = ask(deployment, top_k=5)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "top_k"
        assert not server.bodies
        assert ask(deployment, top_k=None, temperature=0.5).status_code == 200


def test_a_kind_of_server_brings_its_parameters(tmp_path: Path) -> None:
    entry = {"engine": "vllm"}
    with (
        running(Server()) as server,
        deployment_of(tmp_path, {"url": server.url, **entry}) as deployment,
    ):
        assert ask(deployment, top_k=5, min_p=0.1, ignore_eos=True).status_code == 200
        sent = server.bodies[-1]
        assert (sent["top_k"], sent["min_p"], sent["ignore_eos"]) == (5, 0.1, True)
        assert sent["cache_salt"] and deployment.tenant_id not in sent["cache_salt"]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", ""])
def test_template_variables_reach_the_servers_that_take_them(tmp_path: Path, kind: str) -> None:
    wanted = {"enable_thinking": False}
    with (
        running(Server()) as server,
        deployment_of(tmp_path, {"url": server.url, "engine": kind}) as deployment,
    ):
        answer = ask(deployment, chat_template_kwargs=wanted)
        if kind:
            assert answer.status_code == 200, answer.text
            assert server.bodies[-1]["chat_template_kwargs"] == wanted
        else:  # OpenAI's own API has no such parameter
            assert answer.status_code == 400 and not server.bodies
            assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_what_one_upstream_cannot_take_goes_to_the_other(tmp_path: Path) -> None:
    with running(Server(hold_s=1.0)) as first, running(Server(hold_s=1.0)) as second:
        entries = [
            {"url": each.url, "name": name, "max_in_flight": 1}
            for name, each in (("first", first), ("second", second))
        ]
        with deployment_of(tmp_path, *entries) as deployment:
            found: list[httpx.Response] = []
            threads = [
                threading.Thread(target=lambda: found.append(ask(deployment))) for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert sorted(each.status_code for each in found) == [200, 200, 429]
            refused = next(each for each in found if each.status_code == 429)
            assert refused.json()["error"]["code"] == "upstream_busy"
            assert "retry-after" in refused.headers
            assert len(first.bodies) == len(second.bodies) == 1


async def test_requests_a_minute_are_bounded() -> None:
    with running(Server()) as server:
        engine = OpenAIEngine(Upstream(server.url, requests_per_minute=6), "m")
        await engine.start()
        await (await engine.generate(job("r1"))).ended(10)
        with pytest.raises(TollhouseError) as caught:
            await engine.generate(job("r2"))
        assert caught.value.code == "upstream_busy"
        assert 9 < (caught.value.retry_after_s or 0) <= 10
        await engine.close()


async def test_an_entrys_limits_hold_over_all_processes_that_share_a_redis() -> None:
    need_redis()
    prefix = new_prefix()
    with running(Server(hold_s=0.3)) as server:
        upstream = Upstream(server.url, max_in_flight=2, requests_per_minute=600)
        shared = [RedisCounters(REDIS, prefix=prefix, timeout_s=10) for _ in range(2)]
        engines = [
            OpenAIEngine(upstream, "m", UpstreamLimits(upstream, each, SystemClock()))
            for each in shared
        ]
        try:
            for engine in engines:
                await engine.start()
            asked = [engines[n % 2].generate(job(f"r{n}")) for n in range(6)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in found if isinstance(each, TollhouseError)]
            assert {each.code for each in refused} == {"upstream_busy"} and len(refused) == 4
            for each in found:
                if not isinstance(each, BaseException):
                    await each.ended(10)
            async with asyncio.timeout(60):
                while True:  # what has ended gives its place back, also to the other process
                    try:
                        await (await engines[0].generate(job("again"))).ended(10)
                        break
                    except TollhouseError:
                        await asyncio.sleep(0.05)
        finally:
            for engine in engines:
                await engine.close()
            for each in shared:
                await each.close()
            forget(prefix)


def job(name: str, namespace: str = "t1", adapter: str | None = None, **more: Any) -> Job:
    asked = InferenceRequest(
        "/v1/chat/completions", "m", messages=[{"role": "user", "content": "Hi"}], **more
    )
    return Job(GenerateRequest(name, namespace, [1], SamplingParams(2), adapter), asked)


async def test_adapters_are_loaded_by_its_endpoints_under_their_weights_name() -> None:
    with running(Server()) as server:
        server.metrics = VLLM
        engine = OpenAIEngine(Upstream(server.url), "m")
        await engine.start()
        digest = "ab" * 32
        await engine.load_adapter("/adapters/a", digest)
        assert server.adapters == [lora_name(digest)]
        assert digest in engine.adapters()
        await (await engine.generate(job("r1", adapter=digest))).ended(10)
        assert server.bodies[-1]["model"] == lora_name(digest)
        server.adapters.clear()  # it was started anew
        engine._update_adapters(await engine._get("/v1/models"))
        assert digest not in engine.adapters(), "so it is loaded again"
        stats = engine.stats()
        async with asyncio.timeout(60):
            while stats is None or stats.waiting != 4:
                await asyncio.sleep(0.05)
                stats = engine.stats()
        await engine.close()


def test_its_metrics_page_says_how_busy_it_is() -> None:
    stats = stats_of(VLLM)
    assert stats is not None
    assert (stats.running, stats.waiting, stats.blocks_free, stats.blocks_total) == (
        3,
        4,
        750,
        1000,
    )
    assert stats.tokens_waiting == 400
    sglang = stats_of('sglang:num_running_reqs{a="b"} 2.0\nsglang:num_queue_reqs 1.0\n')
    assert sglang is not None and (sglang.running, sglang.waiting) == (2, 1)
    assert stats_of("python_info 1.0\nvllm:num_requests_running NaN\n") is None


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_tenants_do_not_share_a_prefix_cache_that_takes_a_salt(kind: str) -> None:
    salts = {upstream_body(job("r", tenant), "m", kind)["cache_salt"] for tenant in ("t1", "t2")}
    assert len(salts) == 2 and not salts & {"t1", "t2"}
    assert "cache_salt" not in upstream_body(job("r"), "m", kind, shared_cache=True)
    assert "cache_salt" not in upstream_body(job("r"), "m")


def test_llama_cpp_does_not_reuse_its_cache_unless_that_is_declared() -> None:
    penal = upstream_body(job("r", repetition_penalty=1.1), "m", "llama.cpp")
    assert penal["repeat_penalty"] == 1.1 and penal["cache_prompt"] is False
    assert "cache_prompt" not in upstream_body(job("r"), "m", "llama.cpp", shared_cache=True)


def test_sharing_a_cache_that_cannot_be_kept_apart_is_declared() -> None:
    assert Upstream("http://127.0.0.1:1").shares_cache
    assert not Upstream("http://127.0.0.1:1", engine="vllm").shares_cache
    assert Upstream("http://127.0.0.1:1", engine="vllm", shared_cache=True).shares_cache
    assert not Upstream("tcp://127.0.0.1:1").shares_cache


def test_the_price_of_an_entry_is_the_models_until_somebody_sets_another(tmp_path: Path) -> None:
    database, clock = migrated(f"sqlite:///{tmp_path / 'p.db'}"), FakeClock()
    with database.transaction() as session:
        plain = ensure_default_prices(session, clock, "m")
        clock.advance(10)
        first = ensure_price(session, clock, "m", {"input": "1", "output": "2"}, "entry")
        assert first.id != plain.id
        clock.advance(10)
        again = ensure_price(session, clock, "m", {"output": "2", "input": "1"}, "entry")
        assert again.id == first.id
        dearer = ensure_price(session, clock, "m", {"input": "3", "output": "2"}, "entry")
        assert dearer.id != first.id
    database.close()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"price": {"input": 0.5}}, "price"),
        ({"max_in_flight": -1}, "max_in_flight"),
        ({"parameters": "top_k"}, "parameters"),
        ({"speed": 1}, "speed"),
        ({"shared_cache": "no"}, "shared_cache"),
        ({"shared_cache": False, "engine": "tgi"}, "shared_cache"),
    ],
)
def test_a_wrong_entry_stops_the_start(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        read_upstreams(json.dumps([{"url": "http://127.0.0.1:1", **entry}]))


def test_an_unknown_kind_or_parameter_stops_the_start(tmp_path: Path) -> None:
    for wrong in ({"engine": "ours"}, {"parameters": ("sharpness",)}):
        upstream = Upstream("http://127.0.0.1:1", model="m", **wrong)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="parameters"):
            make_engines(Settings(data_dir=tmp_path), [upstream], print, print)
