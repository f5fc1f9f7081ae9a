"""The payment provider's page where a tenant adds a card, for the API and the dashboard."""

from billing.payments import push
from billing.payments.base import Refused, TryLater
from core.errors import BadRequest, Conflict, Unavailable
from core.outbound import check_address
from core.tenants import audit
from core.tenants.scope import TenantScope
from gateway.wiring import Services


def setup_link(services: Services, scope: TenantScope, return_url: str = "") -> str:
    """The URL of the page; card numbers never pass through the gateway. Raises Conflict when payments
    are recorded manually, Unavailable when the provider does not answer. Call it outside a
    transaction: it waits for the provider."""
    settings = services.settings
    destination = (
        return_url or settings.public_url or f"http://{settings.host}:{settings.port}/dashboard"
    )
    try:
        check_address(destination)
    except BadRequest:
        raise BadRequest(
            f"return_url is {destination[:80]!r}, which is not a valid URL.", param="return_url"
        ) from None
    try:
        customer = push.customer_of(
            services.database, services.clock, services.payments, scope.tenant_id
        )
        link = services.payments.setup_link(customer, destination)
    except Refused as error:
        raise Conflict(str(error), next_step="Ask the operator how to pay.") from None
    except TryLater as error:
        raise Unavailable(f"The payment provider does not answer: {error}") from None
    with services.database.transaction() as session:
        audit.record(session, scope, services.clock, "payment_method.setup", customer, None, None)
    return link
