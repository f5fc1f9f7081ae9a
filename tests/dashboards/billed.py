"""A deployment whose tenant has a final invoice."""

from datetime import timedelta

from sqlalchemy import select

from billing.accounts.accounts import Periods, ensure_account, lock_account
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.subscriptions.subscriptions import create_plan, subscribe
from core.money import units_of
from tests.gateway.deployment import Deployment


def bill_a_fee(deployment: Deployment, fee: int = units_of("100")) -> None:
    """A final invoice of a fee in picounits for the month before this one."""
    services = deployment.services
    long_ago = services.clock.now() - timedelta(days=75)
    with services.database.transaction() as session:
        account = ensure_account(session, deployment.tenant_id, long_ago)
        fields = {"name": "fees", "currency": account.currency, "base_fee": fee}
        create_plan(session, long_ago, fields)
        subscribe(session, deployment.tenant_id, "fees", long_ago)
        starts = services.clock.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        account = lock_account(session, deployment.tenant_id)
        Periods(session).around(account, starts - timedelta(days=15))
    invoice_run.run(services.database, services.clock)


def whole_invoice(deployment: Deployment) -> Invoice:
    with deployment.services.database.read() as session:
        query = select(Invoice).where(Invoice.number.is_not(None))
        return session.scalars(query.order_by(Invoice.number)).all()[-1]  # of a whole month
