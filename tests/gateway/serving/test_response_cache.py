"""Complete answers that are given again: who gets them, what they cost, and what is never kept."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI
from sqlalchemy import text

from billing.pricing.prices import PriceDraft, save
from billing.pricing.tables import PriceVersionRow
from billing.rating.rating_worker import rate_all
from core.clock import SystemClock
from core.tenants import keys, organisations
from core.tenants.scope import scope_of_operator
from engine.protocol import FinishReason, TokenChunk
from gateway.cli.main import main
from gateway.serving.cached_answers import AnswerStore, CachedAnswer
from moderation.policy import default_policy
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment

ON = {"x-tollhouse-cache": "on"}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(deployment: Deployment, prompt: str, **more: Any) -> httpx.Response:
    headers = deployment.headers | more.pop("headers", ON)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 6,
        "temperature": 0,
    } | more
    return httpx.post(
        f"{deployment.url}/v1/chat/completions", json=body, headers=headers, timeout=30
    )


def state(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-tollhouse-cache", "").partition(";")[0]


def said(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture
def ruled(deployment: Deployment) -> Iterator[Any]:
    def _set(rule: dict[str, Any] | None) -> httpx.Response:
        url = f"{deployment.url}/admin/v1/response-cache"
        answer = (
            httpx.put(url, json=rule, headers=deployment.headers)
            if rule is not None
            else httpx.delete(url, headers=deployment.headers)
        )
        deployment.services.key_cache.poll()
        return answer

    yield _set
    _set(None)


def test_the_same_request_is_answered_again_without_an_engine(deployment: Deployment) -> None:
    before = len(deployment.engine.submitted)
    first = chat(deployment, "What is a toll?")
    second = chat(deployment, "What is a toll?")
    assert (state(first), state(second)) == ("miss", "hit")
    assert len(deployment.engine.submitted) == before + 1
    assert said(second) == said(first) != ""
    assert second.json()["id"] != first.json()["id"]
    assert first.json()["usage"]["completion_tokens"] == 6
    usage = second.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, 0)
    event = deployment.event(second.headers["x-request-id"])
    assert (event["kind"], event["finish_reason"]) == ("cache_hit", "length")
    counts = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
    assert [event[name] for name in counts] == [0, 0, 0, 0]
    assert event["routed"].startswith(
        f"response cache: answer of {first.headers['x-request-id']}, "
    )
    assert event["counted_by"] is None and event["engine_id"] == ""


@pytest.mark.parametrize("stream_first", [False, True])
def test_a_stream_and_a_whole_answer_share_an_entry(
    deployment: Deployment, client: OpenAI, stream_first: bool
) -> None:
    prompt: Any = [{"role": "user", "content": f"Stream first: {stream_first}"}]
    given: Any = {"model": MODEL, "messages": prompt, "max_tokens": 6, "temperature": 0}

    def whole() -> tuple[str, str | None]:
        raw = client.chat.completions.with_raw_response.create(**given, extra_headers=ON)
        return str(raw.headers["x-tollhouse-cache"]), raw.parse().choices[0].message.content

    def streamed() -> tuple[str, str | None]:
        raw = client.chat.completions.with_raw_response.create(
            **given, stream=True, extra_headers=ON
        )
        chunks = [chunk.choices[0] for chunk in raw.parse() if chunk.choices]
        assert chunks[-1].finish_reason == "length"
        return str(raw.headers["x-tollhouse-cache"]), "".join(
            each.delta.content or "" for each in chunks
        )

    acts = (streamed, whole) if stream_first else (whole, streamed)
    (one, first), (other, second) = (act() for act in acts)
    assert one == "miss" and other.startswith("hit; age=")
    assert first == second != ""


def test_messages_are_served_from_it_with_their_own_sdk(deployment: Deployment) -> None:
    with anthropic.Anthropic(base_url=deployment.url, api_key=deployment.key) as client:
        given: Any = {
            "model": MODEL,
            "max_tokens": 5,
            "extra_body": {"temperature": 0},
            "messages": [{"role": "user", "content": "Who builds a road?"}],
            "extra_headers": ON,
        }
        first = client.messages.with_raw_response.create(**given)
        second = client.messages.with_raw_response.create(**given)
    assert first.headers["x-tollhouse-cache"] == "miss"
    assert second.headers["x-tollhouse-cache"].startswith("hit")
    assert first.parse().content == second.parse().content
    assert second.parse().usage.output_tokens == 0


def test_without_a_rule_or_a_header_nothing_is_cached(deployment: Deployment) -> None:
    for _ in range(2):
        answer = chat(deployment, "Nobody asked for a cache.", headers={})
        assert "x-tollhouse-cache" not in answer.headers


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"tools": [TOOL]}, "tools"),
    ],
)
def test_sampled_answers_and_tools_are_cached_only_if_asked(
    deployment: Deployment, more: dict[str, Any], word: str
) -> None:
    prompt = f"Sampled or with tools: {more}"
    for _ in range(2):
        answer = chat(deployment, prompt, **more)
        assert answer.headers["x-tollhouse-cache"] == f"bypass; reason={word}"
    asked = {"headers": {"x-tollhouse-cache": "sampled, tools"}}
    assert state(chat(deployment, prompt, **more, **asked)) == "miss"
    assert state(chat(deployment, prompt, **more, **asked)) == "hit"


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 7},
        {"seed": 3},
        {"top_p": 0.5},
        {"stop": ["zzzz"]},
        {"n": 2},
        {"logprobs": True},
        {"frequency_penalty": 1.0},
        {"messages": [{"role": "user", "content": "Every part counts!"}]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Every part counts."},
            ]
        },
    ],
    ids=lambda change: "-".join(change),
)
def test_whatever_changes_the_answer_is_part_of_the_key(
    deployment: Deployment, change: dict[str, Any]
) -> None:
    chat(deployment, "Every part counts.")
    assert state(chat(deployment, "Every part counts.")) == "hit"
    before = len(deployment.engine.submitted)
    assert chat(deployment, "Every part counts.", **change).status_code == 200
    assert len(deployment.engine.submitted) == before + 1


def test_what_does_not_change_the_answer_is_not(deployment: Deployment) -> None:
    chat(deployment, "The user does not count.", user="ann")
    answer = chat(deployment, "The user does not count.", user="ben")
    assert state(answer) == "hit"
    assert deployment.event(answer.headers["x-request-id"])["end_user"] == "ben"


def test_logprobs_and_choices_come_from_it_as_they_were(deployment: Deployment) -> None:
    more = {"n": 2, "logprobs": True, "top_logprobs": 2, "seed": 5}
    first, second = (chat(deployment, "Two choices", **more) for _ in range(2))
    assert (state(first), state(second)) == ("miss", "hit")
    assert first.json()["choices"] == second.json()["choices"]
    assert len(second.json()["choices"]) == 2


def test_another_organisation_never_sees_it(deployment: Deployment) -> None:
    assert state(chat(deployment, "A secret of one organisation")) == "miss"
    clock = SystemClock()
    with deployment.services.database.transaction() as session:
        other = organisations.create_tenant(session, clock, name="neighbour")
        scope = scope_of_operator(other.id)
        project = organisations.create_project(session, scope, clock, name="default")
        issued = keys.issue(session, scope, clock, project_id=project.id, name="k")
    mine = deployment.headers
    theirs = {"authorization": f"Bearer {issued.secret}"}
    assert state(chat(deployment, "A secret of one organisation", headers=ON | theirs)) == "miss"
    assert state(chat(deployment, "A secret of one organisation", headers=ON | mine)) == "hit"


def test_a_rule_caches_without_a_header_and_a_header_may_decline(
    deployment: Deployment, ruled: Any
) -> None:
    shown = ruled({"ttl_s": 60}).json()
    assert shown["rule"] == {"ttl_s": 60, "sampled": False, "tools": False}
    assert state(chat(deployment, "By rule", headers={})) == "miss"
    hit = chat(deployment, "By rule", headers={})
    assert state(hit) == "hit" and int(hit.headers["x-tollhouse-cache"].rpartition("=")[2]) <= 60
    assert state(chat(deployment, "By rule", headers={"x-tollhouse-cache": "off"})) == "off"
    before = len(deployment.engine.submitted)
    assert state(chat(deployment, "By rule", headers={"x-tollhouse-cache": "refresh"})) == "refresh"
    assert len(deployment.engine.submitted) == before + 1
    assert state(chat(deployment, "By rule", headers={})) == "hit"


def test_erased_answers_are_neither_served_nor_kept_in_memory(deployment: Deployment) -> None:
    store = deployment.services.pipeline.cache.store
    chat(deployment, "To be erased")
    assert deployment.tenant_id in store.tenants
    assert state(chat(deployment, "To be erased")) == "hit"
    url = f"{deployment.url}/admin/v1/response-cache/erase"
    assert httpx.post(url, headers=deployment.headers).json()["erased_at"]
    deployment.services.key_cache.poll()
    assert state(chat(deployment, "To be erased")) == "miss"
    assert httpx.post(url, headers=deployment.headers).status_code == 200
    deployment.services.key_cache.poll()
    for _ in range(2_000):
        if deployment.tenant_id not in store.tenants:
            break
        httpx.get(f"{deployment.url}/healthz")
    assert deployment.tenant_id not in store.tenants


def test_a_stopped_answer_is_not_kept_and_a_kept_one_meets_the_policy_of_now(
    deployment: Deployment,
) -> None:
    first = chat(deployment, "Moderated", max_tokens=12)
    word = max(said(first).split(), key=len).strip(".,:;!?")
    assert len(word) > 2 and state(chat(deployment, "Moderated", max_tokens=12)) == "hit"
    with httpx.Client(
        base_url=f"{deployment.url}/admin/v1", headers=deployment.headers, timeout=60
    ) as admin:
        document = default_policy().to_dict()
        document["output"]["deny"] = [word]
        assert admin.put("/policies", json=document).status_code == 200
        try:
            hit = chat(deployment, "Moderated", max_tokens=12)
            assert state(hit) == "hit"
            assert hit.json()["choices"][0]["finish_reason"] == "content_filter"
            assert word not in (said(hit) or "")
            for _ in range(2):
                new = chat(deployment, "Moderated", max_tokens=12, headers=ON | {"x-a": "b"}, n=2)
                assert state(new) == "miss"
                assert new.json()["choices"][0]["finish_reason"] == "content_filter"
        finally:
            assert admin.delete("/policies").status_code == 200


def test_an_answer_that_fails_is_not_kept(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def _fail(request: Any, mailbox: Any) -> None:
        mailbox.put(TokenChunk(request.request_id, 0, [50]))
        mailbox.put(TokenChunk(request.request_id, 0, [51], finish_reason=FinishReason.ERROR))
        mailbox.finish(None)

    with monkeypatch.context() as patch:
        patch.setattr(deployment.engine, "_run", _fail)
        assert chat(deployment, "Fails once").status_code == 503
    assert state(chat(deployment, "Fails once")) == "miss"


def test_a_hit_has_its_own_price_and_the_books_agree(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, clock = deployment.services, SystemClock()
    with services.database.transaction() as session:
        save(session, clock, PriceDraft(f"{MODEL}@cache", {"request": "0.002"}, clock.now()))
    services.prices.refresh()
    chat(deployment, "Priced")
    hit = chat(deployment, "Priced")
    assert state(hit) == "hit"
    event = deployment.event(hit.headers["x-request-id"])
    with services.database.read() as session:
        version = session.get_one(PriceVersionRow, event["price_version"])
        assert version.model == f"{MODEL}@cache"
    rate_all(services.database, clock)
    with services.database.read() as session:
        charge = session.execute(
            text("select amount, requests, input_tokens from charges where request_id = :id"),
            {"id": event["request_id"]},
        ).one()
    assert int(charge.amount) == 2_000_000_000  # 0.002 dollars in picounits
    assert (charge.requests, charge.input_tokens) == (1, 0)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(services.settings.data_dir))
    assert main(["audit", "--json"]) == 0


def test_limits_apply_to_a_hit(deployment: Deployment) -> None:
    clock, database = SystemClock(), deployment.services.database
    with database.transaction() as session:
        scope = scope_of_operator(deployment.tenant_id)
        project = organisations.projects(session, scope)[0]
        issued = keys.issue(session, scope, clock, project_id=project.id, name="limited")
    url = f"{deployment.url}/admin/v1/limits"
    limit = {"scope": "key", "unit": "requests", "limit": 2, "target": issued.id}
    assert httpx.put(url, json=limit, headers=deployment.headers).status_code == 200
    deployment.services.key_cache.poll()
    headers = ON | {"authorization": f"Bearer {issued.secret}"}
    answers = [chat(deployment, "Limited", headers=headers) for _ in range(3)]
    assert [state(each) for each in answers[:2]] == ["miss", "hit"]
    assert answers[2].status_code == 429


@pytest.mark.parametrize("given", ["yes", "ttl=0", "ttl=x", "ttl=999999", "on=1", "off=1", ""])
def test_a_wrong_header_is_refused_by_name(deployment: Deployment, given: str) -> None:
    answer = chat(deployment, "Hi", headers={"x-tollhouse-cache": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-tollhouse-cache"


@pytest.mark.parametrize(
    "written", [True, {"ttl_s": 0}, {"ttl_s": "60"}, {"ttl": 60}, {"sampled": 1}, []]
)
def test_a_wrong_rule_is_refused_by_name(deployment: Deployment, written: Any) -> None:
    answer = httpx.patch(
        f"{deployment.url}/admin/v1/tenant",
        json={"settings": {"response_cache": written}},
        headers=deployment.headers,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "settings.response_cache"


def test_the_memory_is_bounded_and_the_largest_tenant_gives_way() -> None:
    store = AnswerStore(20_000)

    def answer(size: int, expires: float = 9.0) -> CachedAnswer:
        return CachedAnswer(b"x" * size, False, "req", 0.0, expires, "")

    store.put("small", b"a", answer(500))
    for number in range(100):
        store.put("large", b"%d" % number, answer(1_000))
        assert store.size <= 20_000
    assert store.get("small", b"a", 1.0) is not None
    assert store.get("large", b"0", 1.0) is None
    assert store.get("large", b"99", 1.0) is not None
    store.put("large", b"huge", answer(6_000))
    assert store.get("large", b"huge", 1.0) is None
    assert store.get("small", b"a", 9.0) is None, "it has expired"
    store.drop_expired(9.0)
    assert (store.size, store.tenants) == (0, [])


def test_an_answer_expires(deployment: Deployment) -> None:
    answer = {"headers": {"x-tollhouse-cache": "ttl=1"}}
    assert state(chat(deployment, "Short-lived", **answer)) == "miss"
    while state(chat(deployment, "Short-lived", **answer)) == "hit":  # hits do not prolong it
        time.sleep(0.1)


def test_the_command_sets_erases_and_turns_it_off(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(deployment.services.settings.data_dir))

    def run(*options: str) -> dict[str, Any]:
        assert main(["tenant", "cache", "--tenant", "demo", "--json", *options]) == 0
        shown: dict[str, Any] = json.loads(capsys.readouterr().out)
        return shown

    assert run("--ttl", "90", "--tools")["rule"] == {"ttl_s": 90, "sampled": False, "tools": True}
    before = run()["erased_at"]
    assert run("--erase")["erased_at"] != before
    assert run()["rule"] is not None
    assert run("--off")["rule"] is None
    assert main(["tenant", "cache", "--tenant", "demo", "--ttl", "0"]) == 2


def test_the_page_sets_it_and_a_request_shows_its_hit(deployment: Deployment) -> None:
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        page = "/dashboard/request-settings"
        wrong = owner.post(page, data={"act": "cache", "ttl_s": "0"})
        assert wrong.status_code == 400 and "ttl_s (1 to 86400)" in wrong.text
        made = owner.post(page, data={"act": "cache", "ttl_s": "120", "tools": "yes"})
        assert made.status_code == 200 and "120 s" in made.text and "also: tools" in made.text
        deployment.services.key_cache.poll()  # else an earlier erasure may come between the two
        hit = [chat(deployment, "Shown on a page") for _ in range(2)][1]
        request_id = hit.headers["x-request-id"]
        deployment.event(request_id)
        shown = owner.get(f"/dashboard/requests/{request_id}").text
        assert "no engine ran" in shown and "response cache: answer of req_" in shown
        off = owner.post(page, data={"act": "off"})
        assert off.status_code == 200 and "120 s" not in off.text
    with closing(browser(deployment, with_role(deployment, "viewer"))) as viewer:
        assert "Cache answers" not in viewer.get(page).text
        assert viewer.post(page, data={"act": "erase"}).status_code == 403


def test_openai_reports_the_wrong_header_as_a_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="x-tollhouse-cache"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            extra_headers={"x-tollhouse-cache": "always"},
        )
