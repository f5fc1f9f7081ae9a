"""Invariant: every decision is recorded with the policy version, and no row holds text."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from core import compiled
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest, Conflict, NotFound
from core.events import ModerationEvent
from core.queue import TaskContext
from core.settings import Settings
from core.tenants import keys
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import TenantScope, scope_of_operator
from moderation import appeals, daily_counts, policies, records, strikes, tasks
from moderation.categories import SCORED
from moderation.dry_run import dry_run, trial_of
from moderation.errors import BadPolicy
from moderation.models import Decision
from moderation.policy import Policy, default_policy
from moderation.screener import Screener
from moderation.verdict import ScreenedText
from tests.compiled import built_extension
from tests.moderation.helpers import WordClassifier


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = Path(compiled.__file__).with_name("kernel.c")
    return built_extension(source, tmp_path_factory.mktemp("records"))


SECRET_TEXT = "poison the xylophone of bob@example.com"


@pytest.fixture
def scope(sqlite_database: Database, clock: FakeClock) -> TenantScope:
    with sqlite_database.transaction() as session:
        tenant = create_tenant(session, clock, name="acme")
        return scope_of_operator(tenant.id)


def event(scope: TenantScope, clock: FakeClock, number: int, **more: object) -> ModerationEvent:
    policy = Policy.from_dict({"input": {"categories": {"violence": {"block": 0.9}}}})
    screener = Screener(WordClassifier(violence="poison"))
    verdict = screener.check_input([ScreenedText("user", SECRET_TEXT)], policy)
    made = records.event_of(
        verdict,
        request_id=f"req_{number}",
        tenant_id=scope.tenant_id,
        project_id="proj_1",
        key_id="key_1",
        at=clock.now(),
        direction="input",
        text_sha256=records.fingerprint(SECRET_TEXT, b"secret"),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_what_acted_is_counted_by_day_and_twice_is_once(
    database: Database, clock: FakeClock
) -> None:
    with database.transaction() as session:
        scope = scope_of_operator(create_tenant(session, clock, name="counted").id)
    day = clock.now().replace(hour=12)
    found = [
        event(scope, clock, 1, at=day),
        event(scope, clock, 2, at=day, categories=("violence", "hate")),
        event(scope, clock, 3, at=day, action="allow", categories=()),
        event(scope, clock, 4, at=day, action="allow", categories=(), unscanned=True),
        event(scope, clock, 5, at=day - timedelta(days=1)),
    ]
    start = day.replace(hour=0, minute=0, second=0, microsecond=0)
    for sent in (found[:3], found, found):
        with database.transaction() as session:
            records.store(session, sent)
    with database.read() as session:
        counted = sorted(
            daily_counts.counts_between(session, scope, start, start + timedelta(days=1))
        )
        stored = records.decisions(session, scope, acted=True)
    assert counted == [
        ("allow", [], 1),
        ("block", ["hate", "violence"], 1),
        ("block", ["violence"], 1),
    ]
    assert [each.request_id for each in stored] == ["req_4", "req_2", "req_1", "req_5"]


def test_a_decision_names_its_policy_and_holds_no_word_of_the_text(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    made = event(scope, clock, 1)
    with sqlite_database.transaction() as session:
        assert records.store(session, [made]) == 1
        row = session.execute(text("select * from moderation_decisions")).mappings().one()
    everything = " ".join(str(value) for value in row.values())
    assert row["policy_version"].startswith("pol_")
    assert not [word for word in ("xylophone", "poison", "bob") if word in everything]


def test_a_replayed_event_is_stored_once(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        batch = [event(scope, clock, n) for n in range(3)]
        assert records.store(session, batch) == 3
        assert records.store(session, batch) == 0
        assert records.counts(session, scope, clock.now()) == {"block": 3}


def test_a_tenant_sees_only_its_own(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        records.store(session, [event(scope, clock, 1)])
        assert records.decisions(session, scope_of_operator("org_other")) == []
        assert len(records.decisions(session, scope)) == 1


def test_the_export_has_a_line_a_decision(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        records.store(session, [event(scope, clock, n) for n in range(5)])
    with sqlite_database.read() as session:
        until = clock.now() + timedelta(seconds=1)
        found = records.every_decision(session, scope, clock.now() - timedelta(days=1), until)
        lines = list(records.export_csv(found))
    assert len(lines) == 6
    assert lines[0].startswith("at,request_id,")
    assert "xylophone" not in "".join(lines)


def test_retention_forgets_what_is_old_and_keeps_the_rest(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    old = event(scope, clock, 1, at=clock.now() - timedelta(days=91))
    with sqlite_database.transaction() as session:
        records.store(session, [old, event(scope, clock, 2)])
    context = TaskContext(Settings(), sqlite_database, clock)
    assert tasks.forget(context) == 1
    with sqlite_database.read() as session:
        assert [row.request_id for row in session.scalars(select(Decision))] == ["req_2"]
    assert tasks.digest(context) == {scope.tenant_id: {"block": 1}}


def test_the_most_special_policy_is_in_force(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        assert policies.in_force(session, scope, "proj_1", "key_1") == default_policy()
        tenant = policies.put(session, scope, clock, {"name": "tenant"})
        assert policies.in_force(session, scope, "proj_1", "key_1").version == tenant.version
        project, made = _key(session, scope, clock)
        key = policies.put(session, scope, clock, {"name": "k"}, level="key", target=made)
        assert policies.in_force(session, scope, project, made).version == key.version
        assert policies.in_force(session, scope, project, "key_2").version == tenant.version
        policies.retire(session, scope, clock, level="key", target=made)
        assert policies.in_force(session, scope, project, made).version == tenant.version
        with pytest.raises(BadRequest, match="no key 'key_2'"):
            policies.put(session, scope, clock, {}, level="key", target="key_2")
        assert policies.version(session, scope, key.version).name == "k"
        assert [row.level for row in policies.history(session, scope)] == ["key", "tenant"]


def test_a_wrong_policy_is_not_stored(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        with pytest.raises(BadPolicy, match="violense"):
            wrong = {"input": {"categories": {"violense": {"block": 1.0}}}}
            policies.put(session, scope, clock, wrong)
        with pytest.raises(BadPolicy, match="nothing detects 'person'"):
            undetected = {"output": {"entities": {"person": "redact"}}}
            policies.put(session, scope, clock, undetected)
        with pytest.raises(BadRequest, match="level"):
            policies.put(session, scope, clock, {}, level="planet", target="earth")
        assert policies.history(session, scope) == []


def test_a_dry_run_says_what_a_policy_would_have_done(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    milder = Policy.from_dict({"input": {"categories": {"violence": {"annotate": 0.5}}}})
    with sqlite_database.transaction() as session:
        records.store(session, [event(scope, clock, n) for n in range(4)])
    with sqlite_database.read() as session:
        result = dry_run(milder, records.decisions(session, scope), milder)
    assert result.changes == {("block", "annotate"): 4}
    assert (result.changed, result.decided) == (4, 4)
    assert result.policy_version == milder.version and result.untried == ()


def test_a_dry_run_names_the_rules_that_it_cannot_try_and_a_trial_of_them_only_counts() -> None:
    rules = {
        "deny": ["old", "zorgblat"],
        "allow": ["fine"],
        "patterns": [{"name": "p", "pattern": "T-[0-9]", "action": "block"}],
        "entities": {"card": "redact", "email": "block"},
    }
    known = {"deny": ["old"], "entities": {"email": "annotate"}}
    policy = Policy.from_dict({"input": rules})
    in_force = Policy.from_dict({"input": known})
    assert dry_run(policy, [], in_force).untried == (
        "input: phrase 'zorgblat'",
        "input: allowed phrase 'fine'",
        "input: pattern 'p'",
        "input: entity card",
    )
    trial = trial_of(policy, in_force)
    found = {
        text: Screener().check_input([ScreenedText("user", text)], trial).action.word
        for text in ("old", "zorgblat", "T-1", "4111 1111 1111 1111", "ann@acme.example")
    }
    assert list(found.values()) == ["block", "annotate", "annotate", "annotate", "block"]
    assert Policy.from_dict(trial.to_dict()) == trial


def _key(session: Session, scope: TenantScope, clock: FakeClock) -> tuple[str, str]:
    project = create_project(session, scope, clock, name="bots")
    return project.id, keys.issue(session, scope, clock, project_id=project.id, name="k").id


def test_strikes_suspend_a_key_by_rule_and_an_appeal_voids_one(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    context = TaskContext(Settings(), sqlite_database, clock)
    with sqlite_database.transaction() as session:
        _, key_id = _key(session, scope, clock)
        policies.put(session, scope, clock, {"strikes": {"limit": 3, "window_hours": 24}})
        clock.advance(1)
        events = [event(scope, clock, n, key_id=key_id) for n in range(3)]
        records.store(session, events)
        assert strikes.count_blocked(session, events) == 3
        assert strikes.count_blocked(session, events) == 0
        appeal = appeals.open_appeal(session, scope, clock, "req_0", "It was about weeds.")
        appeals.decide(session, scope, clock, appeal.id, grant=True)
    assert tasks.apply_strikes(context) == []
    with sqlite_database.transaction() as session:
        strikes.count_blocked(session, [event(scope, clock, 9, key_id=key_id)])
    assert tasks.apply_strikes(context) == [key_id]
    with sqlite_database.transaction() as session:
        assert keys.get(session, scope, key_id).revoked_at is not None
        clock.advance(60)
        strikes.lift(session, scope, clock, key_id)
        assert keys.get(session, scope, key_id).revoked_at is None
    assert tasks.apply_strikes(context) == []


def test_strikes_outside_the_window_do_not_count(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        strikes.count_blocked(session, [event(scope, clock, n) for n in range(3)])
        clock.advance(hours=23)
        assert strikes.strikes_of(session, "key_1", clock, 24) == 3
        clock.advance(hours=2)
        assert strikes.strikes_of(session, "key_1", clock, 24) == 0


def test_an_appeal_needs_a_decision_a_reason_and_comes_once(
    sqlite_database: Database, scope: TenantScope, clock: FakeClock
) -> None:
    with sqlite_database.transaction() as session:
        records.store(session, [event(scope, clock, 1)])
        with pytest.raises(NotFound):
            appeals.open_appeal(session, scope, clock, "req_404", "why")
        with pytest.raises(BadRequest):
            appeals.open_appeal(session, scope, clock, "req_1", "  ")
        made = appeals.open_appeal(session, scope, clock, "req_1", "why")
        with pytest.raises(Conflict):
            appeals.open_appeal(session, scope, clock, "req_1", "again")
        with pytest.raises(NotFound):
            appeals.decide(session, scope_of_operator("org_x"), clock, made.id, grant=True)
        appeals.decide(session, scope, clock, made.id, grant=False, answer="It stands.")
        assert [found.status for found in appeals.appeals(session, scope)] == ["denied"]


@given(st.lists(st.one_of(st.floats(0, 1), st.just(1)), max_size=13))
def test_the_compiled_scores_are_the_plain_ones(kernel: Any, scores: list[float]) -> None:
    given, found = dict(zip(SCORED, scores, strict=False)), []
    for function in (None, kernel.recorded_scores):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "recorded_scores", function)
            found.append(list(records._recorded(given).items()))
    assert found[0] == found[1]


@given(st.floats(0, 1))
def test_scores_are_recorded_to_four_decimals(score: float) -> None:
    found = records._recorded({"violence": score})
    assert bool(found) is (score >= 0.001)
    for each in found.values():
        assert each == round(each, 4)
        assert abs(each - score) <= 0.5001e-4
