"""What every engine client keeps: the fake, an engine process over ZeroMQ, an OpenAI-like server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from core.errors import TollhouseError
from engine.protocol import FinishReason, GenerateRequest, SamplingParams
from gateway.catalog.upstreams import Upstream
from gateway.engines.fake import FakeEngine
from gateway.engines.local import EngineOptions, EngineProcess
from gateway.engines.openai import OpenAIEngine
from gateway.engines.remote import RemoteEngine
from gateway.request.engine import Chunk, EngineClient, Generation, Job, TextChunk
from gateway.request.inference import InferenceRequest


def job(name: str, *, max_tokens: int = 6, n: int = 1, logprobs: int | None = None) -> Job:
    sampling = SamplingParams(
        max_tokens=max_tokens, n=n, ignore_eos=True, temperature=0.0, logprobs=logprobs
    )
    request = GenerateRequest(name, "tenant", list(range(5, 25)), sampling, deadline_s=30.0)
    messages = [{"role": "user", "content": "Hello"}]
    ask = InferenceRequest(
        "/v1/chat/completions",
        "m",
        messages=messages,
        max_tokens=max_tokens,
        stream=True,
        n=n,
        logprobs=logprobs,
    )
    return Job(request, ask)


async def all_of(generation: Generation) -> list[Chunk]:
    found: list[Chunk] = []
    while chunks := await generation.take():
        found += chunks
    return found


def size(chunk: Chunk) -> int:
    """Tokens: the server below sends one " w" for each."""
    return chunk.text.count(" w") if isinstance(chunk, TextChunk) else len(chunk.tokens)


async def _completions(request: web.Request) -> web.StreamResponse:
    """A small OpenAI-compatible server: one word a token, usage when it was asked for."""
    body = await request.json()
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)

    async def _send(event: dict[str, object]) -> None:
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    for number in range(body["max_tokens"]):
        await asyncio.sleep(0.005)
        last = number == body["max_tokens"] - 1
        for index in range(body.get("n", 1)):
            reason = "length" if last else None
            choice = {"index": index, "delta": {"content": " w"}, "finish_reason": reason}
            if body.get("logprobs"):
                top = [{"token": " w", "logprob": -0.5}] * body["top_logprobs"]
                told = {"token": " w", "logprob": -0.5, "top_logprobs": top}
                choice["logprobs"] = {"content": [told]}
            await _send({"choices": [choice]})
    assert body["stream_options"] == {"include_usage": True}
    total = body["max_tokens"] * body.get("n", 1)
    await _send({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": total}})
    await answer.write(b"data: [DONE]\n\n")
    return answer


@asynccontextmanager
async def openai_engine() -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield OpenAIEngine(Upstream(f"http://127.0.0.1:{port}", name="server"), "m")
    await runner.cleanup()


@asynccontextmanager
async def engine_process(tmp_path: Path) -> AsyncIterator[EngineClient]:
    options = EngineOptions(
        "fake", f"ipc://{tmp_path}/e.sock", tmp_path / "receipts", extra=("--fake",)
    )
    process = EngineProcess(options)
    process.start()
    assert await asyncio.to_thread(process.wait_ready, 60), process.problem
    yield RemoteEngine("local-0", options.address)
    await asyncio.to_thread(process.stop)


@pytest.fixture(params=["fake", "process", "openai"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineClient]:
    if request.param == "fake":
        client: EngineClient = FakeEngine(token_delay_s=0.005)
        await started(client)
        yield client
        await client.close()
        return
    around = engine_process(tmp_path) if request.param == "process" else openai_engine()
    async with around as client:
        await started(client)
        yield client
        await client.close()


async def started(client: EngineClient) -> None:
    await client.start()
    async with asyncio.timeout(60):
        while not client.healthy():
            await asyncio.sleep(0.02)


async def test_chunks_come_then_the_end_with_exact_counts(engine: EngineClient) -> None:
    generation = await engine.generate(job("req_1", n=2))
    chunks = await all_of(generation)
    receipt = generation.receipt
    assert receipt is not None
    for choice in (0, 1):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert sum(map(size, own)) == 6
        assert [bool(c.finish_reason) for c in own] == [False] * (len(own) - 1) + [True]
    assert receipt.generated == 12
    assert receipt.prompt == receipt.cached + receipt.computed == 20
    assert await generation.take() == []


async def test_each_token_comes_with_its_logprob_where_that_is_asked(engine: EngineClient) -> None:
    chunks = await all_of(await engine.generate(job("req_4", logprobs=2)))
    told: list[tuple[float, int]] = []
    for chunk in chunks:
        if isinstance(chunk, TextChunk):
            content = (chunk.logprobs or {"content": []})["content"]
            told += [(each["logprob"], len(each["top_logprobs"])) for each in content]
        else:
            assert [each.token for each in chunk.logprobs or ()] == chunk.tokens
            told += [(each.logprob, len(each.top)) for each in chunk.logprobs or ()]
    assert len(told) == 6 and all(logprob <= 0 and top == 2 for logprob, top in told)
    bare = await all_of(await engine.generate(job("req_5")))
    assert all(chunk.logprobs is None for chunk in bare)


async def test_a_cancelled_request_ends_early_and_still_has_its_receipt(
    engine: EngineClient,
) -> None:
    generation = await engine.generate(job("req_2", max_tokens=400))
    first = await generation.take()
    generation.cancel()
    receipt = await generation.ended(10)
    assert receipt is not None
    assert sum(map(size, first)) <= receipt.generated < 400
    assert receipt.prompt == receipt.cached + receipt.computed


async def test_many_requests_at_once_do_not_mix(engine: EngineClient) -> None:
    generations = [await engine.generate(job(f"req_{i}")) for i in range(10, 26)]
    answers = await asyncio.gather(*(all_of(each) for each in generations))
    for number, chunks in enumerate(answers):
        assert {chunk.request_id for chunk in chunks} == {f"req_{number + 10}"}
        assert sum(map(size, chunks)) == 6


async def test_an_engine_remembers_a_receipt_until_it_is_acknowledged(
    engine: EngineClient,
) -> None:
    if engine.speaks_text:
        assert await engine.receipt("req_3") is None
        return
    await all_of(await engine.generate(job("req_3")))
    kept = await engine.receipt("req_3")
    assert kept is not None and kept.generated == 6 and kept.finish_reason == FinishReason.LENGTH
    await engine.acknowledge(["req_3"])
    async with asyncio.timeout(60):
        while await engine.receipt("req_3") is not None:
            await asyncio.sleep(0.02)
    assert await engine.receipt("req_unknown") is None


async def test_an_unreachable_engine_is_unhealthy_and_says_so(tmp_path: Path) -> None:
    for client in (
        RemoteEngine("gone", f"ipc://{tmp_path}/nobody.sock"),
        OpenAIEngine(Upstream("http://127.0.0.1:9"), "m"),
    ):
        await client.start()
        with pytest.raises(TollhouseError) as caught:
            await all_of(await client.generate(job("req_4")))
        assert caught.value.code == "engine_unavailable"
        await client.close()
