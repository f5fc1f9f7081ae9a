"""Text that needs nothing is written in the turn in which it was read, and nobody can tell.

Every case runs twice: through the steps of the delivery alone, and as the gateway does it. After each
event of the upstream the client must have the same bytes, and the records must be the same at the
end. Where a read holds several events, only the places where events begin and end, and the order of
the events of several choices, may differ.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.formats.chat.response import ChatSurface
from gateway.request.engine import Chunk, Mailbox
from tests.gateway.answers.test_delivery import Money, Replica, Route
from tests.gateway.answers.test_held_chunks import (
    ENDINGS,
    GUARDS,
    PIECES,
    SURFACES,
    Run,
    StepByStep,
    cut_up,
    event_of,
    last_events,
)


def same_text(sent: bytes) -> list[Any]:
    """The events by choice, neighbours that differ in their text alone joined."""
    joined: dict[int, list[Any]] = {}
    for line in sent.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        event.pop("sequence_number", None)
        number = (event.get("choices") or [{}])[0].get("index", 0)
        text, of_choice = _cut_text(event), joined.setdefault(number, [])
        if text and of_choice and of_choice[-1][0] == event:
            of_choice[-1][1] += text
        else:
            of_choice.append([event, text])
    return [joined[number] for number in sorted(joined)]


def _cut_text(event: dict[str, Any]) -> str:
    """Takes the piece of text out of an event that has one."""
    choice = (event.get("choices") or [{}])[0]
    for holder, name in ((choice.get("delta"), "content"), (choice, "text"), (event, "delta")):
        if isinstance(holder, dict) and isinstance(holder.get(name), str):
            text, holder[name] = holder[name], ""
            holder.pop("role", None)  # which the first piece of a choice has
            holder.pop("refusal", None)
            return str(text)
    delta = event.get("delta")
    return delta.pop("text", "") if isinstance(delta, dict) else ""


@settings(max_examples=250, deadline=None)
@given(
    surface=st.sampled_from(SURFACES),
    guard=st.sampled_from(["none", "none", "none", *sorted(GUARDS)]),
    pieces=st.lists(
        st.tuples(st.sampled_from([*PIECES, "x" * 600]), st.integers(0, 1)), max_size=40
    ),
    choices=st.sampled_from([1, 1, 1, 2]),
    tools=st.sampled_from([False, False, True]),
    told=st.lists(st.booleans(), min_size=40, max_size=40),
    asked=st.sampled_from([False, False, True]),
    ending=st.sampled_from(ENDINGS),
    reads=st.none() | st.lists(st.integers(0, 4_000), max_size=6),
    slow=st.lists(st.booleans(), max_size=40),
    money=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 40)),
)
async def test_the_client_and_the_records_cannot_tell(
    *,
    surface: Any,
    guard: str,
    pieces: list[tuple[str, int]],
    choices: int,
    tools: bool,
    told: list[bool],
    asked: bool,
    ending: str,
    reads: list[int] | None,
    slow: list[bool],
    money: tuple[int, int] | None,
) -> None:
    text = surface.route == "/v1/completions"
    choices = choices if text or surface.route.endswith("chat/completions") else 1
    events = [
        event_of(surface, piece, at % choices, logprobs=asked and told[number], reason=None)
        for number, (piece, at) in enumerate(pieces)
    ]
    events += last_events(surface, ending, choices)
    if reads is not None:
        events = cut_up(b"".join(events), reads)
    plain, passed = [
        await Run(
            kind,
            surface,
            guard,
            choices,
            tools=tools and not text,
            logprobs=asked,
            money=Money(*money) if money is not None and reads is None else None,
        ).seen(events, ending, slow=slow)
        for kind in (StepByStep, Mailbox)
    ]
    if reads is not None:
        plain, passed = [
            [same_text(each) if isinstance(each, bytes) else each for each in seen[:-5]]
            + [(same_text(seen[-5][0]), *seen[-5][1:]), *seen[-4:]]
            for seen in (plain, passed)
        ]
    assert passed == plain


@settings(max_examples=150, deadline=None)
@given(
    guard=st.sampled_from(["default", "redact", "rules", "block"]),
    pieces=st.lists(
        st.sampled_from(["the cat sat ", "on the mat. ", " a", "poison ", "bob@example.org "]),
        min_size=8,
        max_size=40,
    ),
    money=st.none() | st.tuples(st.integers(0, 60), st.integers(0, 10)),
    slow=st.lists(st.booleans(), max_size=40),
)
async def test_a_guarded_answer_ends_where_it_would(
    guard: str, pieces: list[str], money: tuple[int, int] | None, slow: list[bool]
) -> None:
    """By a verdict, or by the money that covers no more."""
    events = [event_of(ChatSurface(), each, 0, logprobs=False, reason=None) for each in pieces]
    events += last_events(ChatSurface(), "stop", 1)
    plain, passed = [
        await Run(
            kind, ChatSurface(), guard, 1, money=Money(*money) if money is not None else None
        ).seen(events, "stop", slow=slow)
        for kind in (StepByStep, Mailbox)
    ]
    assert passed == plain


async def turns_of(guard: str, events: Sequence[bytes]) -> tuple[int, int]:
    """How often the delivery's task ran, and how many writes the client got."""
    taken = list[int]()

    class Counted(Mailbox):
        async def take(self, needed: int = 1) -> list[Chunk]:
            chunks = await super().take(needed)
            taken.append(len(chunks))
            return chunks

    run = Run(Counted, ChatSurface(), guard, 1)
    await run.seen([*events, *last_events(ChatSurface(), "stop", 1)], "stop")
    return len(taken), len(run.client.sent)


async def test_the_task_sleeps_while_text_passes() -> None:
    events = [
        event_of(ChatSurface(), f"word{number} ", 0, logprobs=False, reason=None)
        for number in range(200)
    ]
    turns, writes = await turns_of("none", events)
    assert turns < 5 and writes >= 200
    guarded, _ = await turns_of("rules", events)
    assert guarded > turns


async def test_what_passes_delays_the_keep_alive() -> None:
    """The wait for the next text begins anew with each piece that passed."""
    run = Run(Mailbox, ChatSurface(), "none", 1)
    run.delivery._keep_alive_s = 0.5
    route = Route(Replica("one", run.mailbox))  # type: ignore[arg-type]
    task = asyncio.ensure_future(run.delivery.run(route, run.job))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert run.parser is not None
    piece = event_of(ChatSurface(), "a ", 0, logprobs=False, reason=None)
    for event in [*[piece] * 8, *last_events(ChatSurface(), "stop", 1)]:
        run.parser.on_data(event)
        await asyncio.sleep(0.12)
    assert await task == 200
    assert b"keep-alive" not in b"".join(run.client.sent)


@pytest.mark.parametrize("surface", SURFACES, ids=lambda each: each.route)
async def test_text_that_passed_is_in_the_records(surface: Any) -> None:
    run = Run(Mailbox, surface, "none", 1)
    pieces = ["one ", "two ", "three"]
    events = [event_of(surface, each, 0, logprobs=False, reason=None) for each in pieces]
    await run.seen([*events, *last_events(surface, "stop", 1)], "stop")
    choice = run.delivery.choices[0]
    assert "".join(choice.text) == "one two three"
    assert (choice.received, choice.generated, choice.delivered) == (13, 13, 13)
    assert run.meter.closed[0].delivered == 13


async def test_a_long_piece_is_delivered_by_the_task() -> None:
    """More than a turn of the event loop may take."""
    events = [
        event_of(ChatSurface(), each, 0, logprobs=False, reason=None)
        for each in ("first ", "x" * 3_000, " last")
    ]
    run = Run(Mailbox, ChatSurface(), "none", 1)
    await run.seen([*events, *last_events(ChatSurface(), "stop", 1)], "stop")
    assert "".join(run.delivery.choices[0].text) == "first " + "x" * 3_000 + " last"
    assert run.meter.closed[0].delivered == 3_011


@pytest.mark.parametrize(("guard", "most"), [("default", 30), ("redact", 30), ("rules", 30)])
async def test_the_task_sleeps_while_a_guard_only_looks(guard: str, most: int) -> None:
    """It is woken where a verdict may end the answer."""
    events = [
        event_of(ChatSurface(), f"word{number} ", 0, logprobs=False, reason=None)
        for number in range(200)
    ]
    turns, writes = await turns_of(guard, events)
    assert turns < most < writes


async def test_a_guard_that_fails_while_text_passes_ends_the_answer() -> None:
    """As one that fails in the delivery's own steps: nothing more is sent, and the engine stops."""
    run = Run(Mailbox, ChatSurface(), "rules", 1)
    route = Route(Replica("one", run.mailbox))  # type: ignore[arg-type]
    task = asyncio.ensure_future(run.delivery.run(route, run.job))  # type: ignore[arg-type]
    cancelled = list[str]()
    run.mailbox._abort = cancelled.append
    piece = event_of(ChatSurface(), "word ", 0, logprobs=False, reason=None)
    for number in range(4):
        for _ in range(8):
            await asyncio.sleep(0)
        if number == 2:
            run.delivery.choices[0].feed_run = _fails  # type: ignore[method-assign]
        assert run.parser is not None
        run.parser.on_data(piece * number)
    with pytest.raises(ZeroDivisionError):
        await task
    assert b"".join(run.client.sent).count(b"word ") == 1
    assert set(cancelled) == {"r"} and run.client.last, "the stream says that it failed"


def _fails(_chunks: Sequence[Chunk]) -> None:
    raise ZeroDivisionError
