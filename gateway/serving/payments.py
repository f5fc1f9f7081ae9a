"""The payment provider and the tax service, Stripe when a key is set, and the pages for cards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from billing.accounts.tables import BillingAccount
from billing.payments import push
from billing.payments.base import BankInstructions, PaymentProvider, Refused, TryLater
from billing.payments.manual import ManualPayments
from billing.payments.methods import TRANSFER, saved
from billing.payments.provider_bills import methods_of, transfer_of
from billing.taxes.taxes import TaxService
from billing.usage.in_transit import UsageInTransit
from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, Conflict, SettingError, Unavailable
from core.extras import imports_of
from core.outbound import check_address
from core.settings import Settings
from core.tenants import audit
from core.tenants.scope import TenantScope
from gateway.metering.streams.storing import StreamTransit

Answer = TypeVar("Answer")


def make_payments(settings: Settings) -> PaymentProvider:
    """Raises SettingError when Stripe's API base is not a valid URL."""
    if not settings.stripe_api_key:
        return ManualPayments()
    # Imported here: Stripe's library is slow to import and only needed with a key.
    with imports_of("stripe", "TOLLHOUSE_STRIPE_API_KEY", SettingError):
        from billing.payments.stripe.provider import StripePayments

    return StripePayments(
        settings.stripe_api_key,
        api_base=settings.stripe_api_base,
        webhook_secret=settings.stripe_webhook_secret,
        smart_retries=settings.dunning == "stripe",
    )


def make_taxes(settings: Settings, clock: Clock) -> TaxService | None:
    """None: taxes by the table of rates. Raises SettingError where Stripe Tax has no key."""
    if settings.taxes == "rates":
        return None
    if not settings.stripe_api_key:
        raise SettingError(
            "TOLLHOUSE_TAXES is stripe, but TOLLHOUSE_STRIPE_API_KEY is not set.",
            next_step="Set the key, or TOLLHOUSE_TAXES=rates.",
        )
    with imports_of("stripe", "TOLLHOUSE_TAXES=stripe", SettingError):
        from billing.payments.stripe.taxes import StripeTaxes

    return StripeTaxes(clock, settings.stripe_api_key, settings.stripe_api_base)


def task_services(
    settings: Settings, clock: Clock, payments: PaymentProvider
) -> dict[type, object]:
    """The ports that billing tasks take from their context."""
    services: dict[type, object] = {PaymentProvider: payments}
    if settings.stream_url:
        services[UsageInTransit] = StreamTransit(settings, clock)
    taxes = make_taxes(settings, clock)
    return services | ({TaxService: taxes} if taxes else {})


@dataclass(slots=True)
class CardPages:
    """The payment provider's pages for a tenant, for the API and the dashboard: payment methods, the
    billing portal, and the account for bank transfers."""

    settings: Settings
    clock: Clock
    database: Database
    payments: PaymentProvider

    def link(self, scope: TenantScope, return_url: str = "") -> str:
        """The URL of the page for adding a payment method; card numbers never pass through the gateway.
        Raises Conflict when payments are recorded manually, Unavailable when the provider does not
        answer. Call it outside a transaction: it waits for the provider."""
        with self.database.read() as session:
            chosen = saved(methods_of(session.get(BillingAccount, scope.tenant_id)))
        return self._page(
            scope,
            return_url,
            "payment_method.setup",
            lambda customer, back: self.payments.setup_link(customer, back, chosen),
        )

    def portal(self, scope: TenantScope, return_url: str = "") -> str:
        """The URL of the provider's billing portal; errors as for `link`."""
        return self._page(scope, return_url, "payment_portal.open", self.payments.portal_link)

    def bank_instructions(self, scope: TenantScope) -> BankInstructions:
        """The tenant's account for bank transfers. Conflict unless its setting allows them."""
        with self.database.read() as session:
            account = session.get(BillingAccount, scope.tenant_id)
            if account is None or TRANSFER not in methods_of(account):
                raise Conflict(
                    "Bank transfers through the payment provider are not enabled for this account.",
                    next_step="Ask the operator to add customer_balance to its payment methods.",
                )
            transfer = transfer_of(account)
        return self._asked(
            scope, lambda customer: self.payments.bank_instructions(customer, transfer)
        )

    def _asked(self, scope: TenantScope, call: Callable[[str], Answer]) -> Answer:
        try:
            customer = push.customer_of(self.database, self.clock, self.payments, scope.tenant_id)
            return call(customer)
        except Refused as error:
            raise Conflict(str(error), next_step="Ask the operator how to pay.") from None
        except TryLater as error:
            raise Unavailable(f"The payment provider does not answer: {error}") from None

    def _page(
        self, scope: TenantScope, return_url: str, action: str, call: Callable[[str, str], str]
    ) -> str:
        settings = self.settings
        own_page = settings.public_url or f"http://{settings.host}:{settings.port}/dashboard"
        destination = return_url or own_page
        try:
            check_address(destination)
        except BadRequest:
            raise BadRequest(
                f"return_url is {destination[:80]!r}, which is not a valid URL.", param="return_url"
            ) from None
        customer, link = self._asked(scope, lambda name: (name, call(name, destination)))
        with self.database.transaction() as session:
            audit.record(session, scope, self.clock, action, customer, before=None, after=None)
        return link
