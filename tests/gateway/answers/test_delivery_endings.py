"""What the ending of a delivery says: screening, first token, prompt, and what is left behind."""

import asyncio
from typing import Any

import pytest

from core.errors import InsufficientQuota, Unavailable
from tests.gateway.answers.test_choice_output import Asking, call, guard
from tests.gateway.answers.test_delivery import (
    LOST,
    Case,
    Generated,
    Money,
    Replica,
    Route,
    good,
    said,
)


def first_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pieces of the answer the client had whenever the meter was told of a first token."""
    noted: list[int] = []
    monkeypatch.setattr(
        case.meter, "first_token", lambda: noted.append(len(case.client.sent)), raising=True
    )
    return noted


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_token_is_noted_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    generated = Generated([said("ab")], [said("c", "stop")])
    case = Case(Route(Replica("one", generated)), stream=stream)
    noted = first_tokens(case, monkeypatch)
    assert await case.run() == 200
    assert noted[:1] == [0] and len(noted) == (2 if stream else 1)


async def test_a_replica_that_takes_over_begins_anew() -> None:
    """Its own first chunk closes its breaker, and its tokens alone are held against the money."""
    lost = Replica("one", Generated([said("xxx", count=3)], LOST))
    route = Route(lost, Replica("two", Generated([said("abc", "stop", count=3)])))
    case = Case(route, money=Money(covered=3))
    assert await case.run() == 200
    assert route.answers == 2 and case.money.asked == []
    assert case.client.body == {"text": "abc", "output": 3}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_the_receipt_is_awaited(stream: bool) -> None:
    class Late(Generated):
        async def ended(self, timeout_s: float) -> Any:
            case.client.disconnected = True
            return await super().ended(timeout_s)

    case = Case(Route(Replica("one", Late([said("abc", "stop")]))), stream=stream)
    assert await case.run() == 499
    assert case.ending == ("client_closed", 499, 3 if stream else 0)
    assert case.client.body is None


@pytest.mark.parametrize(("text", "entered"), [("", False), ("a", True), ("ab", True)])
async def test_the_first_token_shows_that_the_prompt_was_processed(
    text: str, entered: bool
) -> None:
    case = Case(Route(Replica("one", Generated([said(text)], LOST))), stream=True)
    try:
        await case.run()
    except type(LOST):
        assert not entered
    (ending,) = case.meter.closed
    assert ending.prompt_done is entered and ending.delivered == len(text)


class Judge:
    """A guard that lets everything pass, with a finding."""

    blocked = needs_second_opinion = undecided = False
    spare = 0
    held, needed, cuts, cut_paid_by = 0, 1, (), "tenant"

    def __init__(self, action: str | None) -> None:
        self.action = action

    def feed(self, text: str, *, last: bool = False) -> str:
        return text

    def flush(self) -> str:
        return ""

    def over(self) -> None:
        return


@pytest.mark.parametrize(
    ("of_the_prompt", "of_the_answer", "recorded"),
    [
        (None, None, None),
        (None, "redact", "redact"),
        ("annotate", "redact", "redact"),
        ("annotate", None, "annotate"),
        ("redact", "annotate", "redact"),
        ("redact", None, "redact"),
    ],
)
async def test_the_event_has_the_stronger_finding(
    of_the_prompt: str | None, of_the_answer: str | None, recorded: str | None
) -> None:
    case = Case(Route(Replica("one", good())))
    case.delivery._make_guards = lambda: [Judge(of_the_answer)]  # type: ignore[list-item]
    case.meter.moderation = of_the_prompt
    assert await case.run() == 200 and case.client.body == {"text": "abc", "output": 3}
    assert case.meter.moderation == recorded


@pytest.mark.parametrize("payer", ["tenant", "operator"])
async def test_the_policy_says_who_pays_for_an_answer_that_a_call_ended(payer: str) -> None:
    tools = [{"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}]
    text = "I send it." + call("swordfish")
    case = Case(Route(Replica("one", good(text))), stream=True, tools=tools)
    case.delivery._make_guards = lambda: [guard("block", payer)]
    assert await case.run() == 200
    (ending,) = case.meter.closed
    assert (ending.finish_reason, ending.paid_by) == ("content_filter", payer)
    assert ending.delivered == (0 if payer == "operator" else len(text))
    assert case.meter.moderation == "block"


async def test_a_stream_that_has_ended_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer would keep all of the request in memory until it fires."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    plain = loop.call_at

    def _noted(when: float, *given: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(plain(when, *given, **more))
        return timers[-1]

    monkeypatch.setattr(loop, "call_at", _noted)
    case = Case(Route(Replica("one", good())), stream=True, keep_alive_s=60.0)
    assert await case.run() == 200
    assert timers and all(each.cancelled() for each in timers)


async def test_money_that_is_used_up_covers_no_further_token() -> None:
    generated = Generated([said("ab", count=2)], [said("c", count=1)], [said("d", "stop")])
    case = Case(Route(Replica("one", generated)), money=Money(covered=2))
    with pytest.raises(InsufficientQuota):
        await case.run()
    assert case.client.body is None and case.money.asked == [3]
    assert case.ending == ("insufficient_quota", 429, 0) and generated.cancelled == 1


async def test_a_stream_whose_money_ends_has_what_was_paid_and_says_why_it_ends() -> None:
    generated = Generated([said("ab", count=2)], [said("c", count=1)], [said("d", "stop")])
    case = Case(Route(Replica("one", generated)), money=Money(covered=2), stream=True)
    assert await case.run() == 429
    assert b"".join(case.client.sent) == b"<ab!insufficient_quota" and case.client.last
    assert case.ending == ("insufficient_quota", 429, 2) and generated.cancelled == 1


@pytest.mark.parametrize("blocks", [True, False])
async def test_the_answer_waits_for_a_second_opinion(blocks: bool) -> None:
    case = Case(Route(Replica("one", good())))
    case.delivery._make_guards = lambda: [Asking(blocks)]
    assert await case.run() == 200
    assert case.client.body == {"text": "" if blocks else "abc", "output": 0 if blocks else 3}
    assert case.ending[0] == ("content_filter" if blocks else "stop")


async def test_a_stream_that_fails_stops_its_engine_and_who_counts_is_left_to_the_receipt() -> None:
    generated = Generated([said("ab")], LOST)
    case = Case(Route(Replica("one", generated)), stream=True)
    assert await case.run() == 503
    (ending,) = case.meter.closed
    assert generated.cancelled == 1 and ending.counted_by is None


async def test_an_engine_that_ends_without_a_word_or_a_receipt_is_unavailable() -> None:
    generated = Generated([])
    generated.receipt = None
    with pytest.raises(Unavailable, match="ended the request early"):
        await Case(Route(Replica("one", generated))).run()
