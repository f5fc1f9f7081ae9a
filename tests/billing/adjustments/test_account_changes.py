"""Changes of billing details: a tax id is checked against its region, whichever of them changes."""

import pytest
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.adjustments import account_changes, act_requests, billing_details
from billing.adjustments.act_requests import ActRequest, Kind
from billing.invoicing import earlier_periods
from billing.notices.alert_targets import AlertTargets
from core.errors import BadRequest, Conflict
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


def test_only_what_is_named_is_changed_and_checked(session: Session) -> None:
    account = change(session, anchor_day=15, timezone="Asia/Tokyo", email="a@b.example")
    assert (account.anchor_day, account.timezone, account.email) == (
        15,
        "Asia/Tokyo",
        "a@b.example",
    )
    assert account.anchored_at == START, "its periods begin elsewhere from now on"
    assert change(session, tax_region="").tax_region == ""
    shown = account_changes.describe(account)
    assert (shown["opened"], shown["anchor_day"], shown["tax_exempt"]) == (True, 15, False)
    assert len(shown) == 18 and shown["tenant_id"] == "acme"
    account.tax_region, account.tax_id = "XX", "old"
    assert change(session, postal_code="1").postal_code == "1", "neither of the two is looked at"


def test_a_zone_that_does_not_exist_is_refused_before_anything_changes(session: Session) -> None:
    account = lock_account(session, "acme")
    with pytest.raises(BadRequest, match="no time zone 'Mars/Olympus'") as refused:
        change(session, timezone="Mars/Olympus")
    assert refused.value.next_step == "Use an IANA name such as Europe/Berlin."
    assert (account.timezone, account.anchored_at) == ("UTC", None)


def test_details_are_changed_by_an_act_and_back_unless_they_changed_since(session: Session) -> None:
    done = billing_details.change(session, "acme", {"legal_name": "A", "tax_exempt": True}, START)
    assert done == {
        "tenant_id": "acme",
        "before": {"legal_name": "acme", "tax_exempt": False},
        "after": {"legal_name": "A", "tax_exempt": True},
    }
    with pytest.raises(BadRequest, match="This changes nothing"):
        billing_details.change(session, "acme", {"legal_name": "A"}, START)
    account = lock_account(session, "acme")
    account.address = "1 Road\nTown"
    assert billing_details.said(account) == {
        "Legal name": "A",
        "Address": "1 Road, Town",
        "E-mail for invoices": "none",
        "Tax region": "none",
        "Tax id": "none",
        "Postal code": "none",
        "Exempt from tax": "yes",
    }
    back = billing_details.change_back(session, "acme", done, START)
    assert back["after"] == {"legal_name": "acme", "tax_exempt": False}
    assert billing_details.said(account)["Exempt from tax"] == "no"
    with pytest.raises(Conflict, match="Legal name was changed again since"):
        billing_details.change_back(session, "acme", done, START)


@pytest.mark.parametrize(
    ("kind", "given", "kept"),
    [
        (Kind.GRANT, {"kind": "promo", "priority": "7", "expires_at": None}, ("promo", 7)),
        (Kind.GRANT, {"expires_at": "2026-01-01T00:00:00Z"}, ("2026-01-01T00:00:00+00:00",)),
        (Kind.CREDIT_NOTE, {"refund": True}, (True,)),
        (Kind.CREDIT_NOTE, {"refund": "yes"}, (True,)),
        (Kind.CREDIT_NOTE, {"refund": "no"}, (False,)),
        (Kind.PLAN, {"overrides": {"base_fee": "12.50"}}, ({"base_fee": "12.5"},)),
        (Kind.VOID, None, ()),
    ],
)
def test_the_terms_of_an_act_are_kept_in_their_types(
    kind: Kind, given: dict[str, object] | None, kept: tuple[object, ...]
) -> None:
    request = ActRequest(kind, "acme", "r", terms=given)
    assert tuple(act_requests.checked_terms(request).values()) == kept


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        (Kind.VOID, {"refund": True}, "void has no term 'refund'"),
        (Kind.GRANT, {"priority": "high"}, "A term of grant is wrong"),
        (Kind.GRANT, {"expires_at": "2026-01-01T00:00:00"}, "has no time zone"),
        (Kind.PLAN, {"overrides": {"base_fee": 12.5}}, "A term of plan is wrong"),
    ],
)
def test_a_wrong_term_is_named(kind: Kind, given: dict[str, object], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        act_requests.checked_terms(ActRequest(kind, "acme", "r", terms=given))
    assert refused.value.param == "terms"


def test_alerts_go_where_they_can_be_sent() -> None:
    mail = AlertTargets(sends_mail=True)
    mail.check(emails=["a@b.example"])
    AlertTargets().check(emails=[])
    AlertTargets(networks=["127.0.0.0/8"]).check(["http://127.0.0.1/hook"])
    for targets, given, reason in (
        (AlertTargets(), {"emails": ["a@b.example"]}, "the deployment has no mail server"),
        (mail, {"webhooks": ["http://127.0.0.1/hook"]}, "leads to a private address"),
        (mail, {"webhooks": ["ftp://example.com"]}, "is not a valid webhook URL"),
    ):
        with pytest.raises(BadRequest, match=reason):
            targets.check(**given)


@pytest.mark.parametrize(
    ("spent", "included", "committed", "terms"),
    [
        (0, 10, 0, (0, 0)),
        (4, 10, 0, (-4, 0)),
        (15, 10, 0, (-10, 0)),
        (-5, 10, 20, (0, 25)),
        (15, 10, 20, (-10, 15)),
        (30, 10, 20, (-10, 0)),
        (31, 10, 20, (-10, 0)),
        (29, 10, 20, (-10, 1)),
    ],
)
def test_a_corrected_period_has_its_included_usage_and_its_shortfall(
    spent: int, included: int, committed: int, terms: tuple[int, int]
) -> None:
    assert earlier_periods._terms(spent, included, committed) == terms
