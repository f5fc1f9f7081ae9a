"""The inbox: what Stripe tells, once, whether doubled, late, out of order, strange or forged."""

import pytest
from sqlalchemy import func, select

from billing.invoicing import open_amounts
from billing.payments import inbox
from billing.payments.base import Refused
from billing.payments.fake_stripe import payments
from billing.payments.fake_stripe.webhooks import shuffled, signed
from billing.payments.tables import Dispute, PaymentWebhook, Refund
from core.errors import NotFound
from core.money import units_of
from tests.billing.payments.stripe_deployment import SECRET, Till


def test_an_unknown_event_is_parked_and_can_be_dismissed(till: Till) -> None:
    strange = till.stripe.books.emit("galaxy.exploded", {"object": "galaxy", "id": "gal_1"})
    till.bring()
    assert till.apply().done == 0
    assert till.parked() == ["The event type 'galaxy.exploded' is unknown."]
    with till.deployment.database.transaction() as session:
        inbox.dismiss(session, "stripe", strange["id"], "finance", till.deployment.clock.now())
    assert till.parked() == []
    with pytest.raises(NotFound), till.deployment.database.transaction() as session:
        inbox.dismiss(session, "stripe", strange["id"], "finance", till.deployment.clock.now())


def test_what_is_about_nothing_of_ours_is_left_alone_or_parked(till: Till) -> None:
    books = till.stripe.books
    from billing.payments.fake_stripe import invoices as theirs

    stranger = books.make("customer", name="Other", metadata={}, invoice_settings={})
    foreign = theirs.create(books, {"customer": stranger["id"]})
    books.emit("invoice.finalized", foreign)
    lost = theirs.create(
        books, {"customer": stranger["id"], "metadata": {"tollhouse_invoice": "inv_gone"}}
    )
    books.emit("invoice.finalized", lost)
    till.bring()
    with till.deployment.database.read() as session:
        assert set(session.scalars(select(PaymentWebhook.attempts))) == {0}, "none was tried yet"
    for _ in range(inbox.MAX_ATTEMPTS + 1):
        till.apply()
        till.deployment.clock.advance(hours=2)
    (reason,) = till.parked()
    assert "inv_gone" in reason
    with till.deployment.database.transaction() as session:
        name = session.scalar(
            select(PaymentWebhook.external_id).where(PaymentWebhook.parked.is_not(None))
        )
        inbox.release(session, "stripe", str(name), till.deployment.clock.now())
    assert till.apply().later == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{}", "not a Stripe event"),
        (b"[]", "not a Stripe event"),
        (b"not json", "not a Stripe event"),
        (b'{"object": "event", "id": "evt_1", "type": "x", "data": 7}', "not a Stripe event"),
        (b"\xff\xfe", "not a Stripe event|signature"),
    ],
)
def test_a_signed_body_that_is_no_event_is_refused(till: Till, body: bytes, why: str) -> None:
    from stripe import WebhookSignature

    text = body.decode(errors="replace")
    header = WebhookSignature.generate_signature_header(text, SECRET)
    with pytest.raises(Refused, match=why):
        till.provider.event(body, header)


def test_an_event_that_is_too_old_is_refused(till: Till) -> None:
    from stripe import WebhookSignature

    event = till.stripe.books.emit("invoice.paid", {"object": "invoice", "id": "in_1"})
    body, _ = signed(event, SECRET)
    header = WebhookSignature.generate_signature_header(body.decode(), SECRET, 1_000_000_000)
    with pytest.raises(Refused, match="outside the tolerance"):
        till.provider.event(body, header)


@pytest.mark.parametrize("seed", range(8))
def test_events_doubled_and_shuffled_change_nothing(till: Till, seed: int) -> None:
    till.leave_card()
    till.settle()
    invoice = till.invoice(12)
    till.push()
    paid = till.stripe.books.all("payment_intent")[0]["id"]
    payments.create_refund(till.stripe.books, {"payment_intent": paid, "amount": "200"})
    dispute = payments.open_dispute(till.stripe.books, paid, 300)
    payments.close_dispute(till.stripe.books, dispute["id"], "won")
    for part in range(3):
        till.bring(shuffled(till.stripe.books.events, seed + part, copies=2))
        for _ in range(6):
            till.apply()
            till.deployment.clock.advance(hours=1)
    assert till.parked() == []
    done = till.read(invoice.id)
    assert open_amounts.open_minor(done) == 200  # refunded without a credit note
    assert till.cash() == units_of("10")
    with till.deployment.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Refund)) == 1
        assert session.scalars(select(Dispute.status)).all() == ["won"]
    till.audited()


def test_a_lost_webhook_is_made_up_by_any_later_one(till: Till) -> None:
    till.leave_card("0341")
    till.settle()
    invoice = till.invoice(12)
    till.settle()
    assert till.read(invoice.id).status == "final"
    assert [each.status for each in till.payments()] == ["failed"]
    till.stripe.books.declines.clear()
    sent = till.stripe.books.all("invoice")[0]
    from billing.payments.fake_stripe import invoices as theirs

    theirs.pay(till.stripe.books, sent["id"], {})
    told = till.stripe.books.events[till.told :]
    till.bring([each for each in told if each["type"] == "invoice_payment.paid"])
    till.apply()
    assert till.read(invoice.id).status == "paid"
    assert [each.status for each in till.payments()] == ["succeeded"]
