"""A child organisation sees its costs with the mark-up that its invoice will have."""

from collections import defaultdict
from contextlib import closing

import pytest

from billing.organisations.tables import OrganisationLink
from dashboards.pages.costs import costs_table, with_markup
from dashboards.usage_totals import UsageTotals
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment, running_deployment


def totals(**amounts: int) -> UsageTotals:
    counts = {name: defaultdict(int, amount=units) for name, units in amounts.items()}
    return UsageTotals("model", [], counts, {}, [])  # type: ignore[arg-type]


def test_rows_with_the_mark_up_sum_to_the_mark_up_of_the_whole() -> None:
    # 12.5 % of 11 picounits is 1.375, of 7 is 0.875 and of 4 is 0.5: 1 in all, and 12 of 11.
    table = costs_table(totals(large=7, small=4), "USD", 125_000)
    assert [(row["amount"], row["marked_up"]) for row in table.rows] == [(7, 8), (4, 4)]
    assert table.total["marked_up"] == with_markup(11, 125_000) == 12
    plain = costs_table(totals(large=7), "USD")
    assert all(column.key != "marked_up" for column in plain.columns)


def test_the_page_of_a_child_names_its_mark_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        running_deployment(tmp_path_factory.mktemp("markup")) as made,
        closing(browser(made, made.key)) as owner,
    ):
        assert "mark-up" not in owner.get("/dashboard/costs").text
        _link(made)
        for path in ("/dashboard/costs", "/dashboard/"):
            page = owner.get(path)
            assert page.status_code == 200 and "mark-up" in page.text, path


def _link(made: Deployment) -> None:
    with made.services.database.transaction() as session:
        session.add(
            OrganisationLink(
                tenant_id=made.tenant_id,
                parent_id="org_parent",
                pays="self",
                markup_ppm=125_000,
                since=made.services.clock.now(),
                changed_by="operator",
            )
        )
