"""Calm verdicts travel in batches, all others at once: a killed process loses no block."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from core.clock import FakeClock
from core.events import ModerationEvent
from core.tenants.keys import Principal
from gateway.screening.decisions import BATCH_S, MAX_BATCH, DecisionLog, record_secret
from moderation.policy import Policy, default_policy
from moderation.screener import Screener
from moderation.verdict import ScreenedText, Verdict

WHO = cast(Principal, SimpleNamespace(tenant_id="org_1", project_id="prj_1", key_id="key_1"))
SCREENER = Screener()


class Sink:
    def __init__(self) -> None:
        self.batches: list[Sequence[ModerationEvent]] = []

    def __call__(self, events: Sequence[ModerationEvent]) -> None:
        self.batches.append(events)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def log(sink: Sink) -> DecisionLog:
    return DecisionLog(FakeClock(), record_secret("a token of the operator"), sink)


def verdict(text: str, **document: Any) -> Verdict:
    policy = Policy.from_dict(document) if document else default_policy()
    return SCREENER.check_input([ScreenedText("user", text)], policy)


async def test_calm_verdicts_wait_for_each_other(log: DecisionLog, sink: Sink) -> None:
    for number in range(3):
        log.record(f"req_{number}", WHO, "input", verdict("hello"), "hello")
    assert sink.batches == []
    await asyncio.sleep(BATCH_S + 0.2)
    assert [len(batch) for batch in sink.batches] == [3]


async def test_many_calm_verdicts_do_not_wait(log: DecisionLog, sink: Sink) -> None:
    for number in range(MAX_BATCH + 1):
        log.record(f"req_{number}", WHO, "input", verdict("hello"), "hello")
    assert [len(batch) for batch in sink.batches] == [MAX_BATCH]
    log.flush()
    assert [len(batch) for batch in sink.batches] == [MAX_BATCH, 1]


@pytest.mark.parametrize("action", ["annotate", "redact", "block"])
@pytest.mark.parametrize("shadow", [False, True])
async def test_a_verdict_that_did_anything_is_handed_over_at_once(
    log: DecisionLog, sink: Sink, action: str, shadow: bool
) -> None:
    deny = {"deny": [{"text": "zeppelin", "action": action}]}
    found = verdict("a zeppelin", input=deny, shadow=shadow)
    log.record("req_1", WHO, "input", found, "a zeppelin")
    assert [len(batch) for batch in sink.batches] == [1]
    assert sink.batches[0][0].categories == ("deny_list",)


async def test_nothing_gathered_is_nothing_written(log: DecisionLog, sink: Sink) -> None:
    log.flush()
    assert sink.batches == []


async def test_fingerprints_need_the_secret(log: DecisionLog, sink: Sink) -> None:
    other = DecisionLog(FakeClock(), record_secret("another token of his"), sink)
    for each in (log, log, other):
        each.record("req_1", WHO, "input", verdict("hello"), "hello")
        each.flush()
    first, again, foreign = (batch[0].text_sha256 for batch in sink.batches)
    assert first == again != foreign
