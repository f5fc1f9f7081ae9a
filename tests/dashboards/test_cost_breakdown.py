"""Costs by two dimensions, as a page and as a file."""

import httpx
import pytest


@pytest.mark.parametrize(
    "by", ["key_id", "project_id", "end_user", "model", "adapter", "member_id"]
)
@pytest.mark.parametrize("then", ["", "model", "end_user"])
def test_any_two_dimensions_can_be_chosen(owner: httpx.Client, by: str, then: str) -> None:
    page = owner.get("/dashboard/costs/breakdown", params={"by": by, "and": then})
    assert page.status_code == 200 and "Cost breakdown" in page.text
    asked = {"by": by, "and": then, "format": "csv"}
    lines = owner.get("/dashboard/costs/breakdown", params=asked).text.splitlines()
    assert lines[0].endswith("Requests,Tokens in,Tokens out,Cost (USD)")


def test_an_unknown_dimension_is_refused(owner: httpx.Client) -> None:
    assert owner.get("/dashboard/costs/breakdown", params={"by": "colour"}).status_code == 400
