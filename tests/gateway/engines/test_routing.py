"""The router over several replicas, through the whole gateway: who gets the request, who takes over."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from core.clock import FakeClock
from core.errors import Unavailable
from core.events import OpenedRequest, UsageKind
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.loop import Engine
from engine.protocol import GenerateRequest, KvEvent, SamplingParams
from engine.runners.fake import FakeRunner
from gateway.catalog.catalog import ServedModel, Target
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.engines.routing.conversations import Conversations, prefix_hashes
from gateway.engines.routing.prefix_chains import PrefixChains
from gateway.engines.routing.prefix_index import PrefixIndex
from gateway.engines.routing.router import Query, Router
from gateway.metering.meter import Meter, MeterServices
from gateway.metering.spool import Spool, SpoolFile
from gateway.prompts.prompt import Prompt
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest
from tests.gateway.deployment import MODEL, Deployment, running_deployment


def pair(delay_s: float) -> list[FakeEngine]:
    codec = load_codec(MODEL_DIR)
    return [
        FakeEngine(
            engine_id=name,
            vocab_size=codec.vocab_size,
            eos_token_ids=codec.eos_token_ids,
            token_delay_s=delay_s,
        )
        for name in ("left", "right")
    ]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Deployment, list[FakeEngine]]]:
    engines = pair(0.05)
    model = ServedModel(MODEL, load_codec(MODEL_DIR), 512, 0)
    with running_deployment(tmp_path, engines=Engines({MODEL: engines}, [model])) as deployment:
        yield deployment, engines


def ask(deployment: Deployment, *, stream: bool = False, tokens: int = 8) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": tokens,
        "stream": stream,
    }
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_dies_before_the_first_byte_is_replaced_and_billed_once(
    two: tuple[Deployment, list[FakeEngine]], stream: bool
) -> None:
    deployment, (left, right) = two

    async def _die(request: Any, mailbox: Any) -> None:
        left.die()

    left._run = _die  # type: ignore[method-assign]
    answer = ask(deployment, stream=stream)
    assert answer.status_code == 200, answer.text
    assert len(left.submitted) == len(right.submitted) == 1, "left has it first, then right"
    assert left.submitted[0].request_id == right.submitted[0].request_id
    (event,) = deployment.events(1)
    receipt = right.receipts_given[event["request_id"]]
    assert event["engine_id"] == "right"
    assert event["output_tokens"] + event["waived_tokens"] == receipt.generated == 8
    assert event["input_tokens"] == receipt.prompt
    assert event["status"] == 200
    assert event["routed"].startswith("engine_unavailable at left; ")


def test_after_the_first_byte_the_stream_ends_with_an_error_and_an_exact_bill(
    two: tuple[Deployment, list[FakeEngine]],
) -> None:
    deployment, (left, right) = two
    url, got = f"{deployment.url}/v1/chat/completions", []
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": 100,
        "stream": True,
    }
    with httpx.stream("POST", url, json=body, headers=deployment.headers, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                got.append(line)
            if len(got) == 3:
                deployment.call(left.die)
    assert '"error"' in got[-1], got[-1]
    assert not right.submitted, "what has begun is never begun again elsewhere"
    (event,) = deployment.events(1)
    assert event["engine_id"] == "left"
    assert event["status"] == 503
    assert 1 <= event["output_tokens"] < 100
    assert event["finish_reason"] == "engine_unavailable"


def test_failures_open_the_breaker_and_the_metric_says_so(
    two: tuple[Deployment, list[FakeEngine]],
) -> None:
    deployment, (left, _) = two
    for place in deployment.services.router.replicas():
        if place.name == "left":
            for _ in range(3):
                place.failed("it does not answer")
    assert ask(deployment).status_code == 200
    assert not left.submitted
    page = httpx.get(f"{deployment.url}/metrics", timeout=10).text
    assert 'tollhouse_breaker_open{engine="left"} 1.0' in page
    assert 'tollhouse_breaker_openings_total{engine="left"}' in page


def query(ids: list[int], ask: InferenceRequest, tenant: str = "t1") -> Query:
    codec = load_codec(MODEL_DIR)
    target = Target(MODEL, ServedModel(MODEL, codec, 4096, 0))
    return Query(target, Prompt(ask, ids, 16), tenant)


async def test_the_request_goes_where_its_prefix_is() -> None:
    router = Router(FakeClock())
    left, right = pair(0)
    router.serve_by({MODEL: [left, right]})
    info = right.info()
    assert info is not None
    ids = [random.Random(1).randrange(5, 200) for _ in range(400)]
    keys = [key.hex() for key in PrefixChains().keys(info, ids, "t1", None)]
    assert len(keys) == 25
    router.index.apply("right", [KvEvent("stored", keys[:20])])
    plain = InferenceRequest("/v1/completions", MODEL, prompts=(ids,))
    route = router.route(query(ids, plain))
    assert route.next() is not None and route.replica is not None
    assert route.replica.name == "right"
    assert "320 tokens cached" in route.why()
    stranger = router.route(query(ids, plain, tenant="t2"))
    stranger.next()
    assert "cached" not in stranger.why(), "another tenant's cache is not this one's"
    router.index.apply("right", [KvEvent("cleared", [])])
    again = router.route(query(ids, plain))
    again.next()
    assert "cached" not in again.why()


def test_block_keys_are_those_of_the_engine() -> None:
    """The index is fed by a real engine with a public prefix, and finds what that engine holds."""
    prefix = tuple(range(10, 42))
    config = EngineConfig(model="fake", num_blocks=256, public_prefixes=(prefix,))
    engine = Engine(config, FakeRunner(config))
    engine.pool.events = []
    dice = random.Random(2)
    for length, tenant in ((500, "t1"), (100, "t2")):
        prompt = [*prefix, *(dice.randrange(3, 250) for _ in range(length))]
        request = GenerateRequest(f"r{length}", tenant, prompt, SamplingParams(1, temperature=0.0))
        engine.submit(request, "gateway")
        while engine.busy:
            engine.step()
            engine.take_outboxes()
        index, chains = PrefixIndex(), PrefixChains()
        index.apply("it", engine.take_events())
        info = replace(engine.info, public_prefixes=config.public_prefixes)
        for _ in range(2):  # made, then remembered
            keys = list(chains.keys(info, prompt, tenant, None))
            own = keys if tenant == "t1" else keys[2:]
            assert index.overlap(own) == {"it": len(own)}


def test_a_conversation_is_found_by_what_was_said_before() -> None:
    known = Conversations(max_entries=2)
    first = [{"role": "user", "content": "Hello"}]
    known.note(prefix_hashes("t", "m", None, first), "left")
    second = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    marks = prefix_hashes("t", "m", None, second)
    assert known.last(marks) == "left"
    assert known.last(prefix_hashes("other", "m", None, second)) is None
    known.note(marks, "right")
    assert known.last(prefix_hashes("t", "m", None, [*second, *second])) == "right"
    for number in range(2):
        known.note(
            prefix_hashes("t", "m", None, [{"role": "user", "content": str(number)}]), "left"
        )
    assert known.last(prefix_hashes("t", "m", None, [*second, *second])) is None, "it is bounded"


def test_a_drained_replica_gets_nothing_new_until_it_is_resumed(
    two: tuple[Deployment, list[FakeEngine]],
) -> None:
    deployment, (left, right) = two
    operator = {"authorization": f"Bearer {deployment.services.operator_token}"}
    url = f"{deployment.url}/admin/v1/engines"
    done = httpx.post(f"{url}/drain", json={"engine": "left"}, headers=operator, timeout=10)
    assert done.status_code == 200, done.text
    assert (done.json()["state"], done.json()["running"]) == ("drained", 0)
    assert ask(deployment).status_code == ask(deployment).status_code == 200
    assert (len(left.submitted), len(right.submitted)) == (0, 2)
    ready = httpx.get(f"{deployment.url}/readyz", timeout=10)
    assert ready.status_code == 200, "the other one serves"
    unknown = httpx.post(f"{url}/drain", json={"engine": "none"}, headers=operator, timeout=10)
    assert unknown.status_code == 404
    httpx.post(f"{url}/resume", json={"engine": "left"}, headers=operator, timeout=10)
    assert {e["state"] for e in httpx.get(url, headers=operator).json()["data"]} == {"ready"}
    log = deployment.services.database
    with log.read() as session:
        acts = session.execute(text("select action from audit_log where target = 'left'")).all()
    assert {act for (act,) in acts} == {"engine.drain", "engine.resume"}


async def test_a_request_that_moved_is_settled_by_the_engine_that_had_it_last(
    tmp_path: Path,
) -> None:
    """The gateway dies after the move: what it left on disk names the second engine, and only that one
    is asked, or waited for."""
    left, right = pair(0)
    router = Router(FakeClock())
    router.serve_by({MODEL: [left, right]})
    spool = Spool(SpoolFile(tmp_path / "s.db"))
    spool.bind(asyncio.get_running_loop())
    clock = FakeClock()
    opened = OpenedRequest(
        *("req_1", "org", "prj", "key", UsageKind.GENERATION, "/v1/completions", MODEL),
        *(None, None, "price_1", clock.now(), 20, "left"),
    )
    meter = Meter(MeterServices(spool, clock, router.acknowledge_soon), opened)
    await meter.write_opened()
    await meter.rerouted("right")
    (kept,) = spool.file.open_requests()
    assert kept.engine_id == "right"
    for engine in (left, right):
        sampling = SamplingParams(3, ignore_eos=True)
        request = GenerateRequest("req_1", "org", list(range(5, 25)), sampling)
        await (await engine.generate(Job(request, InferenceRequest("r", MODEL)))).ended(10)
    left.receipts_given["req_1"] = replace(left.receipts_given["req_1"], generated=99)
    left._receipts["req_1"] = left.receipts_given["req_1"]
    (found,) = await router.receipts_of(kept)
    assert found.generated == 3, "not the first engine's"
    right.die()
    with pytest.raises(Unavailable):
        await router.receipts_of(kept)
    spool.file.close()
