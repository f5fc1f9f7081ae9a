"""How much is drawn from which grant: to the last picounit, and never a draw of nothing."""

from datetime import UTC, datetime, timedelta

import pytest

from billing.ledger.credits import PREPAID, PROMO, Draw, draw, draw_in_time, draw_whole
from billing.ledger.tables import CreditGrant

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def grant(name: str, kind: str, remaining: int, expires_at: datetime | None = None) -> CreditGrant:
    return CreditGrant(id=name, kind=kind, remaining=remaining, expires_at=expires_at)


def test_a_single_picounit_is_drawn() -> None:
    one = grant("one", PROMO, 5)
    assert draw([one], 1) == [Draw("one", PROMO, 1)]
    assert one.remaining == 4


@pytest.mark.parametrize("units", [0, 3])
def test_nothing_is_drawn_from_what_is_empty_or_not_needed(units: int) -> None:
    empty, full = grant("empty", PROMO, 0), grant("full", PROMO, 3)
    expected = [Draw("full", PROMO, 3)] if units else []
    assert draw([empty, full, grant("spare", PROMO, 9)], units) == expected


def test_a_grant_in_time_pays_the_earliest_usage_and_one_that_pays_nothing_is_no_draw() -> None:
    early = grant("early", PROMO, 10, NOON)
    late = grant("late", PREPAID, 100, NOON + timedelta(hours=2))
    empty = grant("empty", PROMO, 0)
    usage = [(NOON + timedelta(hours=1), 20), (NOON - timedelta(hours=1), 4), (NOON, 7)]
    assert draw_in_time([empty, early, late], usage) == [
        Draw("early", PROMO, 4),
        Draw("late", PREPAID, 27),
    ]
    assert (early.remaining, late.remaining) == (6, 73)


def test_what_one_grant_has_paid_is_left_to_the_next_once() -> None:
    grants = [grant("first", PROMO, 5), grant("second", PREPAID, 9)]
    assert draw_in_time(grants, [(NOON, 5), (NOON, 5)]) == [
        Draw("first", PROMO, 5),
        Draw("second", PREPAID, 5),
    ]


def test_a_refund_among_the_usage_is_not_paid_twice() -> None:
    """What is negative lowers what is owed, and no grant pays for it."""
    wallet = grant("wallet", PREPAID, 100)
    assert draw_in_time([wallet], [(NOON, 10), (NOON, -4)]) == [Draw("wallet", PREPAID, 6)]


def test_all_of_one_kind_is_drawn_or_nothing() -> None:
    wallets = [grant("gift", PROMO, 100), grant("bought", PREPAID, 10), grant("more", PREPAID, 5)]
    assert draw_whole(wallets, 16, PREPAID) == []
    assert draw_whole(wallets, 15, PREPAID) == [
        Draw("bought", PREPAID, 10),
        Draw("more", PREPAID, 5),
    ]
