"""Which of Stripe's payment methods a tenant may use, and the currencies that they take.

Debits and transfers are notified late: a payment may stay `pending` for days before it succeeds or fails.
"""

from collections.abc import Sequence

from core.errors import BadRequest

CARD, SEPA, ACH, TRANSFER = "card", "sepa_debit", "us_bank_account", "customer_balance"
CURRENCIES: dict[str, tuple[str, ...]] = {
    CARD: (),  # any
    SEPA: ("EUR",),
    ACH: ("USD",),
    TRANSFER: ("USD", "EUR", "GBP", "JPY"),
}
METHODS = tuple(CURRENCIES)
# Countries in which Stripe opens virtual accounts for transfers in euros.
EURO_COUNTRIES = ("DE", "FR", "IE", "NL")


def checked(chosen: Sequence[str] | None, currency: str) -> list[str] | None:
    """In the order of METHODS, each once; None leaves the choice to Stripe. BadRequest for others."""
    if not chosen:
        return None
    for name in chosen:
        if name not in CURRENCIES:
            raise BadRequest(
                f"There is no payment method {str(name)[:40]!r}.",
                next_step=f"Use {', '.join(METHODS)}.",
                param="payment_methods",
            )
        takes = CURRENCIES[name]
        if takes and currency not in takes:
            raise BadRequest(
                f"{name} takes {' and '.join(takes)}, and the account is in {currency}.",
                next_step="Choose other payment methods.",
                param="payment_methods",
            )
    return [name for name in METHODS if name in chosen]


def saved(methods: Sequence[str]) -> tuple[str, ...]:
    """Those that a customer can save for later collection; cards if there is no other."""
    return tuple(each for each in methods if each != TRANSFER) or (CARD,)


def euro_country(tax_region: str) -> str:
    """Where the virtual account of a customer is opened."""
    country = tax_region[:2].upper()
    return country if country in EURO_COUNTRIES else "IE"
