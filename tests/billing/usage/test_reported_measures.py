"""What a reported event states by kind, what is wrong with it, and who may report for whom."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.pricing import prices
from billing.pricing.prices import PriceDraft
from billing.pricing.pricing import Component
from billing.usage.reported_usage import Report, Reported, report, report_own
from billing.usage.tables import ReportedEvent, UsageEventRow
from core.errors import BadRequest, Conflict
from core.events import UsageKind
from core.tenants.models import Project
from core.tenants.scope import TenantScope, scope_of_key, scope_of_member, scope_of_operator
from tests.billing.conftest import START, Deployment

C, K = Component, UsageKind


def event(**changes: Any) -> Report:
    plain: dict[str, Any] = {"source": "s", "id": "e1", "kind": K.GENERATION, "subject": "acme"}
    return Report(**(plain | {"at": None, "model": "pages"} | changes))


TOKENS = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": 5}
COUNTED = {C.INPUT: 6, C.CACHED_INPUT: 4, C.OUTPUT: 5}


@pytest.mark.parametrize(
    ("kind", "given", "measures", "quantity", "units"),
    [
        (K.GENERATION, TOKENS, COUNTED, 1, 0),
        (K.GENERATION, TOKENS | {"requests": 7}, COUNTED | {C.REQUEST: 7}, 7, 0),
        (K.EMBEDDING, {"input_tokens": 3}, {C.INPUT: 3}, 1, 0),
        (K.CACHE_HIT, {"requests": 2}, {C.REQUEST: 2}, 2, 0),
        (K.MODERATION, {}, {C.MODERATION: 1}, 1, 0),
        (K.MODERATION, {"requests": 5}, {C.MODERATION: 5}, 5, 0),
        (K.GPU_SECONDS, {"seconds": 9}, {C.GPU_SECOND: 9}, 9, 0),
        (K.AUDIO, {"seconds": 9}, {C.AUDIO_SECOND: 9}, 1, 9),
        (K.SPEECH, {"characters": 8, "requests": 2}, {C.CHARACTER: 8, C.REQUEST: 2}, 2, 8),
        (K.IMAGE, {"images": 3}, {C.IMAGE: 3}, 1, 3),
    ],
)
def test_each_kind_states_its_own_measures(
    kind: UsageKind,
    given: dict[str, int],
    measures: dict[Component, int],
    quantity: int,
    units: int,
) -> None:
    made = event(kind=kind, **given)
    assert (made.measures(), made.quantity, made.units) == (measures, quantity, units)
    assert made.problem() is None
    assert made.key == ("s", "e1")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"requests": 0}, "it states no quantity"),
        ({}, "it states no quantity"),
        ({"kind": K.MODERATION, "requests": 0}, "it states no quantity"),
        ({"kind": K.GPU_SECONDS}, "it states no quantity"),
        ({"kind": K.GPU_SECONDS, "requests": 1}, "gpu_seconds has no requests"),
        ({"kind": K.EMBEDDING, "output_tokens": 1}, "embedding has no output_tokens"),
        ({"kind": K.IMAGE, "seconds": 1}, "image has no seconds"),
        ({"kind": K.CACHE_HIT, "characters": 1}, "cache_hit has no characters"),
        ({"kind": K.AUDIO, "images": 1}, "audio has no images"),
        ({"input_tokens": 4, "cached_tokens": 4}, None),
        ({"input_tokens": 4, "cached_tokens": 5}, "5 cached_tokens exceed 4 input_tokens"),
        ({"kind": K.IMAGE, "seconds": 0, "images": 1}, None),
    ],
)
def test_an_event_states_what_its_kind_has(changes: dict[str, Any], problem: str | None) -> None:
    assert event(**changes).problem() == problem


def test_the_digest_tells_every_field_and_is_that_of_older_versions_without_the_later_ones() -> (
    None
):
    plain = event(requests=1, at=START)
    others = [
        *({"at": START + timedelta(seconds=1)}, {"at": None}, {"model": "m"}, {"adapter": "a"}),
        *({"project": "p"}, {"input_tokens": 1}, {"cached_tokens": 1}, {"output_tokens": 1}),
        *({"requests": 2}, {"seconds": 0}, {"characters": 0}, {"subject": "b"}),
    ]
    digests = {event(**({"requests": 1, "at": START} | each)).digest for each in others}
    assert len(digests | {plain.digest}) == len(others) + 1
    assert event(requests=1, at=datetime(2026, 1, 1, tzinfo=UTC)).digest == plain.digest


@pytest.fixture
def pages(lite: Deployment, session: Session) -> Deployment:
    terms = {"request": "0.01"}
    prices.save(session, lite.clock, PriceDraft("pages", terms, START - timedelta(days=1)))
    for name in ("one", "two"):
        session.add(Project(id=f"proj_{name}", tenant_id="acme", name=name, created_at=START))
    session.flush()
    return lite


def rows(session: Session) -> list[tuple[str, str, str]]:
    found = session.scalars(select(UsageEventRow).order_by(UsageEventRow.client_request_id))
    return [(each.tenant_id, each.project_id, each.key_id) for each in found]


def own(session: Session, made: Deployment, scope: TenantScope, *reports: Report) -> Reported:
    return report_own(session, scope, made.clock, reports)


def test_an_event_becomes_usage_with_each_of_its_fields(
    pages: Deployment, session: Session
) -> None:
    sent = event(id="e1", requests=7, at=START - timedelta(minutes=1), project="one", adapter=None)
    again = event(id="e2", requests=1, project="proj_two", subject="acme")
    assert report(session, pages.clock, [again, sent, again], "ann") == Reported(2, 1)
    first, second = session.scalars(select(UsageEventRow).order_by(UsageEventRow.client_request_id))
    assert (first.tenant_id, first.project_id, first.key_id) == ("acme", "proj_one", "")
    assert (first.kind, first.route, first.model) == ("generation", "/admin/v1/events", "pages")
    assert (first.occurred_at, first.finished_at) == (START - timedelta(minutes=1),) * 2
    assert (first.quantity, first.units, first.status, first.waived_tokens) == (7, 0, 200, 0)
    assert (first.finish_reason, first.settled_by) == ("reported", "reported")
    assert (second.project_id, second.occurred_at) == ("proj_two", START)
    known = session.scalars(select(ReportedEvent).order_by(ReportedEvent.event_id)).all()
    assert [(k.reporter, k.source, k.event_id, k.tenant_id) for k in known] == [
        ("", "s", "e1", "acme"),
        ("", "s", "e2", "acme"),
    ]
    assert [(k.reported_by, k.reported_at, k.digest) for k in known] == [
        ("ann", START, sent.digest),
        ("ann", START, again.digest),
    ]
    assert Reported(1, 2) + Reported(3, 4) == Reported(4, 6)
    assert Reported(1, 2).describe() == {"stored": 1, "duplicates": 2}


def test_a_key_of_a_project_reports_for_it_alone(pages: Deployment, session: Session) -> None:
    of_project = scope_of_key("acme", "proj_one", "key_1", "admin")
    whole = scope_of_operator("acme", "key_2")
    member = scope_of_member("acme", "mem_1", "admin")
    one = {"requests": 1, "subject": ""}
    own(session, pages, of_project, event(id="a", **one), event(id="b", project="one", **one))
    own(session, pages, whole, event(id="c", project="two", **one), event(id="d", **one))
    own(session, pages, member, event(id="e", **one))
    assert rows(session) == [
        ("acme", "proj_one", "key_1"),
        ("acme", "proj_one", "key_1"),
        ("acme", "proj_two", "key_2"),
        ("acme", "", "key_2"),
        ("acme", "", ""),
    ]
    with pytest.raises(BadRequest, match="the key is of another project than 'two'") as refused:
        own(session, pages, of_project, event(id="f", project="two", **one))
    assert (refused.value.param, refused.value.code) == ("data.project", "event_refused")
    with pytest.raises(BadRequest, match="there is no tenant ''"):
        report(session, pages.clock, [event(id="g", **one)], "ann")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"at": START + timedelta(minutes=5)}, None),
        ({"at": START + timedelta(minutes=5, microseconds=1)}, "is in the future"),
        ({"model": "*"}, r"no price of '\*' in USD is in force on 2026-01-01 00:00 UTC"),
        ({"input_tokens": 3}, "has no rate for input"),
        ({"project": "three"}, "the tenant has no project 'three'"),
        ({"subject": "beta"}, "there is no tenant 'beta'"),
    ],
)
def test_an_event_is_refused_with_its_reason_and_with_all_the_others(
    pages: Deployment, session: Session, changes: dict[str, Any], reason: str | None
) -> None:
    sent = [event(requests=1), event(id="e2", **({"requests": 1} | changes))]
    if reason is None:
        assert report(session, pages.clock, sent, "ann") == Reported(2, 0)
        return
    with pytest.raises(BadRequest, match=f"Event 'e2' of 's' is refused: .*{reason}"):
        report(session, pages.clock, sent, "ann")
    assert rows(session) == []


def test_other_contents_under_a_known_id_are_refused(pages: Deployment, session: Session) -> None:
    for sent in ([event(requests=1), event(requests=2)], [event(requests=1)], [event(requests=2)]):
        if sent == [event(requests=1)]:
            assert report(session, pages.clock, sent, "ann") == Reported(1, 0)
            continue
        with pytest.raises(Conflict, match="Event 'e1' of 's' was sent before with other contents"):
            report(session, pages.clock, sent, "ann")
    assert report(session, pages.clock, [event(requests=1)] * 3, "ann") == Reported(0, 3)
    other = event(requests=2, source="t")
    assert report(session, pages.clock, [other], "ann") == Reported(1, 0)
