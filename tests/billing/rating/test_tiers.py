"""Tiers and free units belong to the period, across the versions of a price. Amounts are by hand."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from billing.pricing.pricing import PriceVersion
from billing.rating import rerating
from billing.rating.tables import TierPosition
from billing.usage.tables import Charge
from core.money import units_of
from tests.billing.conftest import START, Deployment
from tests.billing.invoicing.test_invoices import clean

MILLION = 1_000_000


def graduated(first: str, then: str) -> dict[str, Any]:
    tiers = [{"up_to": MILLION, "price": first}, {"up_to": None, "price": then}]
    return {"output": {"scheme": "graduated", "tiers": tiers}}


def volume(first: str, then: str) -> dict[str, Any]:
    tiers = [{"up_to": MILLION, "price": first}, {"up_to": None, "price": then}]
    return {"output": {"scheme": "volume", "tiers": tiers}}


def free(millions: int, price: str) -> dict[str, Any]:
    return {"output": {"scheme": "flat", "price": price, "free": millions * MILLION}}


class Shop:
    """Uses output tokens of one model at prices that change."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    def price(self, written: dict[str, Any], **fields: Any) -> PriceVersion:
        self.deployment.clock.advance(hours=1)
        return self.deployment.price(written, model="tiered", **fields)

    def use(self, version: PriceVersion, tokens: int, *, rate: bool = True, **more: Any) -> None:
        event = self.deployment.event(
            model="tiered",
            price_version=version.id,
            input_tokens=0,
            cached_tokens=0,
            waived_tokens=0,
            output_tokens=tokens,
            **more,
        )
        self.deployment.record(event)
        if rate:
            self.deployment.rate()

    def charged(self, tenant_id: str = "acme") -> int:
        with self.deployment.database.read() as session:
            return session.scalar(
                select(func.sum(Charge.amount)).where(Charge.tenant_id == tenant_id)
            )

    def bills(self, dollars: str, tenant_id: str = "acme") -> None:
        assert self.charged(tenant_id) == units_of(dollars)
        clean(self.deployment)


@pytest.fixture
def shop(lite: Deployment) -> Shop:
    return Shop(lite)


@pytest.mark.parametrize("together", [True, False])
def test_a_price_edit_does_not_renew_the_allowance(deployment: Deployment, together: bool) -> None:
    shop = Shop(deployment)
    first = shop.price(free(10, "0.60"))
    shop.use(first, 10 * MILLION, rate=not together)
    second = shop.price(free(10, "0.80"))
    shop.use(second, 10 * MILLION)
    shop.bills("8.00")


def test_a_graduated_price_goes_on_where_the_version_before_it_ended(shop: Shop) -> None:
    shop.use(shop.price(graduated("2", "1")), 600_000)  # 0.6 at 2
    shop.use(shop.price(graduated("4", "3")), 900_000)  # 0.4 at 4, 0.5 at 3
    shop.bills("4.30")


def test_the_volume_tier_is_that_of_the_whole_period(shop: Shop) -> None:
    shop.use(shop.price(volume("2", "1")), 600_000)
    shop.bills("1.20")
    shop.use(shop.price(volume("3", "1.50")), 900_000)  # 1.5 in all: 0.6 at 1, 0.9 at 1.50
    shop.bills("1.95")


def test_usage_at_a_flat_price_counts_towards_the_tiers_that_follow(
    deployment: Deployment,
) -> None:
    shop = Shop(deployment)
    flat = shop.price({"output": "1"})
    shop.use(flat, 700_000)
    tiered = shop.price(graduated("2", "1"))
    shop.use(tiered, 500_000)  # 0.7 at 1; then 0.3 at 2 and 0.2 at 1
    shop.bills("1.50")
    shop.use(flat, 100_000)  # late: 0.1 at 1, and 0.1 of the others falls from 2 to 1
    shop.bills("1.50")
    again = shop.price({"output": "1"})
    shop.use(again, 100_000)
    last = shop.price(volume("2", "1"))
    shop.use(last, 100_000)
    shop.bills("1.70")


def test_the_order_of_rating_does_not_matter(shop: Shop) -> None:
    first, second = shop.price(graduated("2", "1")), shop.price(graduated("4", "3"))
    at = shop.deployment.clock.now()
    for version, tokens in ((second, 500_000), (first, 600_000), (second, 400_000)):
        shop.use(version, tokens, occurred_at=at)
    shop.bills("4.30")


def test_a_negotiated_price_in_the_middle_of_a_period_does_not_renew_the_allowance(
    shop: Shop,
) -> None:
    shop.deployment.tenant("bolt")
    listed = shop.price(free(10, "0.60"))
    for tenant_id in ("acme", "bolt"):
        shop.use(listed, 10 * MILLION, tenant_id=tenant_id)
    own = shop.price(free(10, "0.50"), tenant_id="acme")
    shop.use(own, 10 * MILLION)
    shop.use(listed, 10 * MILLION, tenant_id="bolt")
    shop.bills("5.00")
    shop.bills("6.00", "bolt")


def test_a_new_period_starts_again(shop: Shop) -> None:
    first = shop.price(free(10, "0.60"))
    shop.use(first, 10 * MILLION)
    second = shop.price(free(10, "0.80"))
    shop.deployment.clock.set(START + timedelta(days=31))  # the first moment of February
    shop.use(second, 11 * MILLION)
    shop.bills("0.80")


def test_an_adapters_own_price_has_an_allowance_of_its_own(shop: Shop) -> None:
    base = shop.price(free(10, "0.60"))
    special = shop.price(free(10, "0.60"), adapter="pirate")
    shop.use(base, 10 * MILLION)
    shop.use(special, 10 * MILLION, adapter="pirate")
    shop.bills("0")


def test_a_package_that_was_begun_is_used_up_first(shop: Shop) -> None:
    package = {"output": {"scheme": "package", "price": "3", "size": MILLION}}
    shop.use(shop.price(package), 1_500_000)  # two packages
    shop.use(shop.price(package), 400_000)
    shop.bills("6")
    shop.use(shop.price(package), 200_000)
    shop.bills("9")


def test_the_discount_of_each_version_is_on_its_own_part(shop: Shop) -> None:
    shop.use(shop.price(graduated("2", "1"), discount_percent="50"), 600_000)  # 1.20 less half
    shop.use(shop.price(graduated("4", "3"), discount_percent="10"), 900_000)  # 3.10 less a tenth
    shop.bills("3.39")


def _rerate(shop: Shop, wrong: PriceVersion, right: PriceVersion, **more: Any) -> int:
    now = shop.deployment.clock.now()
    wanted = rerating.Request(
        wrong.id,
        right.id,
        more.get("starts_at", START),
        more.get("ends_at", now + timedelta(seconds=1)),
    )
    with shop.deployment.database.transaction() as session:
        changes = rerating.post_all(session, shop.deployment.clock, wanted)
        assert rerating.post_all(session, shop.deployment.clock, wanted) == []
    clean(shop.deployment)
    return sum(each.difference for each in changes)


def test_re_rating_does_not_renew_the_allowance(shop: Shop) -> None:
    first = shop.price(free(10, "0.60"))
    shop.use(first, 10 * MILLION)
    wrong = shop.price(free(10, "5.00"))
    shop.use(wrong, 10 * MILLION)
    shop.bills("50")
    right = shop.price(free(10, "0.80"))
    assert _rerate(shop, wrong, right) == units_of("8") - units_of("50")


def test_re_rating_part_of_a_period_keeps_the_place_of_the_rest(shop: Shop) -> None:
    wrong = shop.price(graduated("2", "1"))
    shop.use(wrong, 600_000)
    middle = shop.deployment.clock.now() + timedelta(minutes=1)
    shop.deployment.clock.advance(hours=1)
    shop.use(wrong, 900_000)  # 2.00 + 0.50 in all
    right = shop.price(graduated("4", "3"))
    # 0.6 stay, at 2; then 0.4 at 4 and 0.5 at 3.
    assert _rerate(shop, wrong, right, starts_at=middle) == units_of("4.30") - units_of("2.50")


def test_two_re_ratings_of_a_period_come_to_the_price_of_both(deployment: Deployment) -> None:
    shop = Shop(deployment)
    first, second = shop.price(graduated("2", "1")), shop.price(graduated("4", "3"))
    shop.use(first, 600_000)
    shop.use(second, 900_000)  # 4.30
    right_first, right_second = shop.price(free(0, "1")), shop.price(volume("9", "5"))
    gone = _rerate(shop, second, right_second)
    gone += _rerate(shop, first, right_first)
    # 0.6 at 1, and 0.9 in the tier of 1.5 million, at 5.
    assert gone == units_of("5.10") - units_of("4.30")
    shop.use(second, 100_000)  # late, charged as pinned: 0.1 at 3
    assert _rerate(shop, second, right_second) == units_of("0.50") - units_of("0.30")


def test_positions_say_what_each_version_was_used_for(shop: Shop) -> None:
    flat = shop.price({"output": "1"})
    shop.use(flat, 700_000)
    tiered = shop.price(graduated("2", "1"))
    shop.use(tiered, 500_000)
    with shop.deployment.database.read() as session:
        rows = session.execute(select(TierPosition.price_version, TierPosition.quantity)).all()
    assert {tuple(row) for row in rows} == {(flat.id, 700_000), (tiered.id, 500_000)}
