"""Changes of billing details: a tax id is checked against its region, whichever of them changes."""

import pytest
from sqlalchemy.orm import Session

from billing import account_changes
from billing.accounts import lock_account
from billing.models import BillingAccount
from core.errors import BadRequest
from tests.billing.conftest import START


def change(session: Session, **changes: object) -> BillingAccount:
    account = lock_account(session, "acme")
    account_changes.change(session, account, changes, START)
    return account


def test_a_tax_id_that_changes_alone_is_checked_and_written_as_its_country_does(
    session: Session,
) -> None:
    change(session, tax_region="de")
    assert change(session, tax_id="136 695 976").tax_id == "DE136695976"
    with pytest.raises(BadRequest, match="not valid in DE"):
        change(session, tax_id="136695975")


def test_a_region_that_changes_alone_must_suit_the_tax_id(session: Session) -> None:
    assert change(session, tax_region="DE", tax_id="DE136695976").tax_region == "DE"
    with pytest.raises(BadRequest, match="not valid in FR"):
        change(session, tax_region="FR")


def test_other_details_are_set_without_a_look_at_the_tax_id(session: Session) -> None:
    lock_account(session, "acme").tax_id = "from before ids were checked"
    assert change(session, legal_name="Acme Ltd").legal_name == "Acme Ltd"
