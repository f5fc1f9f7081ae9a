"""Who moves the money, by the settings: Stripe where there is a key, else people."""

from billing.payments.base import PaymentProvider
from billing.payments.manual import ManualPayments
from core.settings import Settings


def make_payments(settings: Settings) -> PaymentProvider:
    """SettingError where Stripe's address is none."""
    if not settings.stripe_api_key:
        return ManualPayments()
    # Stripe's library is large: a house without it does not wait for it.
    from billing.payments.stripe.provider import StripePayments

    return StripePayments(
        settings.stripe_api_key,
        api_base=settings.stripe_api_base,
        webhook_secret=settings.stripe_webhook_secret,
        smart_retries=settings.dunning == "stripe",
    )
