"""Selects the payment provider: Stripe when a key is set, otherwise manual payments."""

from billing.payments.base import PaymentProvider
from billing.payments.manual import ManualPayments
from core.settings import Settings


def make_payments(settings: Settings) -> PaymentProvider:
    """Raises SettingError when Stripe's API base is not a valid URL."""
    if not settings.stripe_api_key:
        return ManualPayments()
    # Imported here: Stripe's library is slow to import and only needed with a key.
    from billing.payments.stripe.provider import StripePayments

    return StripePayments(
        settings.stripe_api_key,
        api_base=settings.stripe_api_base,
        webhook_secret=settings.stripe_webhook_secret,
        smart_retries=settings.dunning == "stripe",
    )
