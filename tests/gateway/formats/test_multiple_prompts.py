"""Several prompts in one completion: each answered as if alone, all of them one request and bill."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from core.clock import FakeClock
from core.errors import Unavailable
from core.events import OpenedRequest, SettledBy, UsageEvent, UsageKind, engine_request_ids
from engine.protocol import GenerateRequest, SamplingParams
from gateway.engines.fake import FakeEngine
from gateway.engines.routing.router import Router
from gateway.metering.recovery import Recovery
from gateway.metering.spool import Spool, SpoolFile
from gateway.request.engine import Generation, Job, Mailbox
from gateway.request.inference import InferenceRequest
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.metering.test_spool import Books

TEXTS = ["The keeper counts", "Two carts and a", "In winter nobody"]


def test_each_prompt_has_choices_of_its_own_and_all_have_one_bill(
    deployment: Deployment, client: OpenAI
) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXTS, n=2, max_tokens=5, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        assert choice.text.startswith(TEXTS[choice.index // 2])
    event = deployment.event(answer._request_id)
    mine = [r for r in deployment.engine.submitted if r.request_id.startswith(event["request_id"])]
    assert [request.request_id for request in mine] == list(
        engine_request_ids(event["request_id"], 3)
    )
    sizes = [len(request.prompt) for request in mine]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == event["input_tokens"] == sum(sizes)
    assert answer.usage.completion_tokens == event["output_tokens"] == 30


def test_each_is_answered_as_if_it_were_alone(client: OpenAI) -> None:
    told: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    together = client.completions.create(prompt=TEXTS, **told)
    for text, choice in zip(TEXTS, together.choices, strict=True):
        alone = client.completions.create(prompt=text, **told).choices[0]
        assert (choice.text, choice.logprobs, choice.finish_reason) == (
            alone.text,
            alone.logprobs,
            alone.finish_reason,
        )


def test_token_ids_and_a_stream_come_prompt_by_prompt(client: OpenAI) -> None:
    ids = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    whole = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0)
    texts = dict.fromkeys(range(3), "")
    with client.completions.create(
        model=MODEL,
        prompt=ids,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        usage = None
        for part in stream:
            usage = part.usage or usage
            for choice in part.choices:
                texts[choice.index] += choice.text
    assert [texts[choice.index] for choice in whole.choices] == [c.text for c in whole.choices]
    assert usage is not None and usage.prompt_tokens == 9 and usage.completion_tokens == 18


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        ["a", [1]],
        ["a", 1],
        [[1], "a"],
        [[1, -1], [2]],
        [[True], [2]],
        ["a"] * 129,
        [None],
    ],
)
def test_what_is_no_list_of_prompts_is_refused(deployment: Deployment, prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    answer = httpx.post(
        f"{deployment.url}/v1/completions", json=body, headers=deployment.headers, timeout=60
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_one_that_is_too_long_refuses_all(client: OpenAI, deployment: Deployment) -> None:
    before = len(deployment.engine.submitted)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=["a", "b " * 4000], max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    assert len(deployment.engine.submitted) == before


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Deployment]:
    with running_deployment(tmp_path, token_delay_s=0.05) as made:
        yield made


def test_a_client_that_leaves_stops_all_of_them_and_pays_what_it_got(slow: Deployment) -> None:
    body = {"model": MODEL, "prompt": TEXTS, "max_tokens": 100, "stream": True}
    with httpx.stream(
        "POST", f"{slow.url}/v1/completions", json=body, headers=slow.headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    (event,) = slow.events(1)
    names = engine_request_ids(event["request_id"], 3)
    receipts = [slow.engine.receipts_given[name] for name in names]
    assert event["status"] == 499
    assert event["input_tokens"] == sum(receipt.prompt for receipt in receipts)
    assert event["output_tokens"] + event["waived_tokens"] == sum(r.generated for r in receipts)
    assert all(receipt.generated < 100 for receipt in receipts)


def test_an_engine_that_dies_ends_all_of_them_with_one_error(slow: Deployment) -> None:
    body = {"model": MODEL, "prompt": TEXTS, "max_tokens": 100, "stream": True}
    with httpx.stream(
        "POST", f"{slow.url}/v1/completions", json=body, headers=slow.headers, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        slow.call(slow.engine.die)
        rest = [line for line in lines if line]
    assert '"error"' in rest[-1]
    (event,) = slow.events(1)
    assert event["status"] >= 500


@pytest.mark.parametrize("late", [False, True])
def test_one_that_the_engine_refuses_ends_all_of_them_unbilled(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """At once, or by its own answer when others were answered already."""
    plain = deployment.engine.generate

    async def _generate(job: Job) -> Generation:
        if not job.engine_request.request_id.endswith(".2"):
            return await plain(job)
        refusal = Unavailable("The queue is full.", code="engine_busy")
        if not late:
            raise refusal
        refused = Mailbox(job.engine_request.request_id, lambda _: None)
        asyncio.get_running_loop().call_later(0.2, refused.fail, refusal)
        return refused

    monkeypatch.setattr(deployment.engine, "generate", _generate)
    body = {"model": MODEL, "prompt": TEXTS, "max_tokens": 3}
    answer = httpx.post(
        f"{deployment.url}/v1/completions", json=body, headers=deployment.headers, timeout=60
    )
    assert answer.status_code == 503
    request_id = answer.headers["x-request-id"]
    event = deployment.event(request_id)
    assert (event["input_tokens"], event["output_tokens"]) == (0, 0)
    deadline = time.monotonic() + 60
    while kept := set(engine_request_ids(request_id, 3)) & set(deployment.engine._receipts):
        assert time.monotonic() < deadline, kept
        time.sleep(0.05)


async def test_after_a_crash_the_sum_of_the_engines_receipts_is_billed(tmp_path: Path) -> None:
    engine, clock = FakeEngine(engine_id="left"), FakeClock()
    await engine.start()
    router = Router(clock)
    router.serve_by({MODEL: [engine]})
    spool = Spool(SpoolFile(tmp_path / "dead.db"))
    spool.bind(asyncio.get_running_loop())
    opened = OpenedRequest(
        *("req_1", "org", "prj", "key", UsageKind.GENERATION, "/v1/completions", MODEL),
        *(None, None, "price_1", clock.now(), 20, "left"),
        prompts=3,
    )
    await spool.open(opened)
    count = spool.begin_stream("req_1")
    assert count is not None
    count.note(6)  # of all prompts, all that they generate
    spool.file.close()
    for size, name in enumerate(opened.engine_request_ids[:2], 5):  # the third never reached it
        sampling = SamplingParams(3, ignore_eos=True)
        request = GenerateRequest(name, "org", list(range(5, 5 + size)), sampling)
        await (await engine.generate(Job(request, InferenceRequest("r", MODEL)))).ended(10)
    books, told = Books(), []

    async def _settled(event: UsageEvent) -> None:
        told.append(event)

    rescue = Recovery(
        tmp_path,
        tmp_path / "own.db",
        books,
        router,
        clock,
        longest_life_s=60,
        on_settled=_settled,
    )
    assert await rescue.round() == 1
    assert (told[0].request_id, told[0].input_tokens, told[0].output_tokens) == ("req_1", 11, 6)
    assert told[0].settled_by is SettledBy.RECEIPT
    assert await router.receipts_of(opened) == [], "acknowledged"
    await engine.close()
