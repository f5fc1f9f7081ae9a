"""Nothing holds a right that its maker did not hold, or that its tenant no longer holds."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from core.database import Database
from core.tenants import invitations, key_bounds, keys, members, sessions
from core.tenants.models import Member
from tests.gateway.security.rights_machine import PROMOTION, Escalation, story, walk


@pytest.mark.parametrize("seed", range(2))
def test_nothing_holds_more_than_its_maker_held_and_its_tenant_holds(
    database: Database, seed: int
) -> None:
    done = walk(database, 100 + seed, 25)
    assert done["granted"] > 25, "the machine tries what nobody may"


@pytest.mark.proof
def test_many_walks(sqlite_database: Database) -> None:
    done: Counter[str] = Counter()
    for seed in range(40):
        done += walk(sqlite_database, seed, 40)
    least = {"issue", "rotate", "add_member", "change_member", "invite", "open_link", "sign_in"}
    assert all(done[name] >= 1 for name in least | {"archive", "revoke", "narrow_or_widen"}), done


def _nothing(*_given: Any, **_named: Any) -> None:
    return None


def _live_alone(key: Any, _address: str) -> None:
    """As when a session looked at its key's end and at nothing else."""


def _any_member(plain: Callable[..., Any]) -> Callable[..., Any]:
    def _checked(session: Any, key: Any, tenant: Any, _member: Member | None, *rest: Any) -> Any:
        return plain(session, key, tenant, None, *rest)

    return _checked


def _own_role(role: str, _cap: str) -> str:
    return role


FAULTS: dict[str, tuple[ModuleType, str, Any]] = {
    "a bounded key changes members": (key_bounds, "check_unrestricted", _nothing),
    "a key issues a wider key": (key_bounds, "check_issue", _nothing),
    "a session is not bound as its key": (sessions, "check_key", _live_alone),
    "an admin changes an owner's key": (keys, "check_role", _nothing),
    "an admin adds an owner": (members, "check_grant", _nothing),
    "a key of a disabled member works": (keys, "_check_usable", _any_member(keys._check_usable)),
    "a key of a lowered member keeps its role": (keys, "lower_role", _own_role),
    "a link works twice": (invitations, "use", _nothing),
    "sessions outlive a change of role": (sessions, "revoke_all", _nothing),
}


def test_promotions_of_members_whose_account_another_may_know(sqlite_database: Database) -> None:
    done = story(sqlite_database, 0, PROMOTION)
    assert done["promote"] and done["single_sign_on refused"] > 8, done


def test_the_machine_finds_an_account_that_outlives_a_promotion(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "end_account", _nothing)
    with pytest.raises(Escalation, match="role='owner'"):
        for seed in range(10):
            story(sqlite_database, seed, PROMOTION)


@pytest.mark.proof
@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_finds_a_seeded_fault(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    module, name, faulty = FAULTS[fault]
    monkeypatch.setattr(module, name, faulty)
    with pytest.raises(Escalation):
        for seed in range(300):
            walk(sqlite_database, 1_000 + seed, 60)
