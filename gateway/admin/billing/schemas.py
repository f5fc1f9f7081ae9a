"""Request bodies of the billing routes. Amounts are decimal strings in the major unit."""

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Base64Bytes, BaseModel, ConfigDict, Field

Amount = Field(pattern=r"^\d{1,12}(\.\d{1,12})?$", examples=["25.00"])


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewBudget(Body):
    scope: Literal["tenant", "project", "key", "label"] = "tenant"
    scope_id: str = Field(
        "",
        max_length=120,
        description="Empty for the tenant itself; of a label team=search, or the like.",
    )
    name: str = Field("", max_length=120)
    cap: str = Amount
    window: Literal["day", "week", "month", "total"] = "month"
    hard: bool = Field(True, description="A soft budget only sends alerts.")
    thresholds: list[int] = Field(default=[50, 80, 100], max_length=10)
    webhooks: list[str] = Field(default=[], max_length=5)
    emails: list[str] = Field(default=[], max_length=10)


class NewExportSchedule(Body):
    what: str = Field(examples=["usage"])
    format: str = "csv"
    every: str = Field("day", description="day, week or month, in UTC.")
    destination: str = Field(
        max_length=1024,
        description="A folder of the tenant; for the operator a directory or s3://bucket/prefix.",
        examples=["books"],
    )
    delay_hours: int = Field(2, description="Wait after the period ends, for late usage.")
    focus_version: str = Field("", description="Of FOCUS: without it the default version.")
    dataset: str = Field("", description="Of FOCUS: without it cost-and-usage.")
    columns: list[str] = Field([], description="Of FOCUS: only these columns.")


class ExportScheduleChange(Body):
    paused: bool | None = None
    focus_version: str | None = Field(None, description="Of FOCUS: write this version from now on.")
    dataset: str = ""
    columns: list[str] = []


class NewCredit(Body):
    kind: Literal["prepaid", "promo"]
    amount: str = Amount
    reference: str = Field(
        min_length=1,
        max_length=120,
        description="Idempotency reference: the same one grants credit once.",
    )
    priority: int = Field(100, ge=0, le=1000, description="The lowest is used first.")
    expires_at: datetime | None = None
    note: str = Field("", max_length=500)


class NewPrice(Body):
    model: str = Field(min_length=1, max_length=120)
    adapter: str = "*"
    currency: str = "USD"
    effective_from: datetime | None = None
    effective_to: datetime | None = None
    discount_percent: str = "0"
    terms: dict[str, Any] = Field(
        description="Price per component, as in billing/pricing/price_terms.py. What it does not name "
        "stays as in the open version before; null removes it."
    )
    note: str = Field("", max_length=500)


class PriceListFile(Body):
    """A list as `tollhouse price import` reads it."""

    content: str = Field(
        min_length=1, max_length=16_000_000, description="JSON of LiteLLM, of OpenRouter or ours"
    )
    models: dict[str, Annotated[str, Field(max_length=120)]] = Field(
        {},
        description="Names of the list, with the public name of each; empty keeps the list's.",
        examples=[{"claude-sonnet-4-5": "claude"}],
    )
    all: bool = Field(False, description="Every model of the list.")
    markup: str = Field("0", max_length=20, description="In percent; a row's own comes first.")
    effective_from: AwareDatetime | None = Field(None, description="By default now.")
    region: str = Field("", max_length=40, description="Of rows that have one.")
    dry_run: bool = Field(False, description="Show the changes without saving.")


class NewPlan(Body):
    name: str = Field(min_length=1, max_length=120)
    currency: str = "USD"
    base_fee: str = Field("0", pattern=r"^\d{1,9}(\.\d{1,12})?$")
    seat_fee: str = Field("0", pattern=r"^\d{1,9}(\.\d{1,12})?$")
    included_seats: int = Field(0, ge=0, le=1_000_000)
    included_usage: str = Field("0", pattern=r"^\d{1,9}(\.\d{1,12})?$")
    minimum_commitment: str = Field("0", pattern=r"^\d{1,9}(\.\d{1,12})?$")
    interval: Literal["month", "year"] = Field("month", description="Interval of the fees.")
    commitment_interval: Literal["month", "year"] | None = Field(
        None, description="Interval of the commitment; by default that of the fees."
    )
    in_advance: bool = Field(
        False, description="Bill fees in advance; a commitment is never billed in advance."
    )
    trial_days: int = Field(
        0, ge=0, le=365, description="Days without fees, for a first subscription."
    )
    grace_hours: int = Field(24, ge=0, le=24 * 28)
    payment_terms_days: int = Field(14, ge=0, le=365)
    suspend_after_days: int | None = Field(None, ge=0, le=365)
    limits_plan: str | None = Field(
        None, max_length=120, description="Limits plan of its tenants while they are subscribed."
    )


class NewAddOn(Body):
    name: str = Field(min_length=1, max_length=120)
    fee: str = Amount
    currency: str = Field("USD", min_length=3, max_length=3)
    interval: Literal["month", "year"] = Field(
        "month", description="The interval of the plans it is added to."
    )


class AddOnQuantity(Body):
    add_on: str = Field(min_length=1, max_length=120)
    quantity: int = Field(ge=0, le=1_000_000, description="0 removes the add-on.")


class Subscribe(Body):
    plan: str = Field(min_length=1, max_length=120)
    seats: int = Field(0, ge=0, le=1_000_000)
    overrides: dict[str, Annotated[str, Field(pattern=r"^\d{1,9}(\.\d{1,12})?$")]] = Field(
        {},
        description="Amounts of this contract by name, such as base_fee, in place of the plan's. "
        "On the same plan those agreed before stay unless some are given.",
    )
    starts_at: datetime | None = Field(
        None, description="Start of the subscription; by default now. A later one waits."
    )


class EndUserErasure(Body):
    end_user: str = Field(min_length=1, max_length=256)


class CancelSubscription(Body):
    at_term_end: bool = False


class PauseSubscription(Body):
    until: AwareDatetime


class AccountChange(Body):
    legal_name: str | None = Field(None, max_length=200)
    address: str | None = Field(None, max_length=2000)
    email: str | None = Field(None, max_length=320)
    tax_id: str | None = Field(None, max_length=80)
    tax_region: str | None = Field(None, max_length=20, examples=["DE", "US-NY"])
    postal_code: str | None = Field(None, max_length=20)
    tax_exempt: bool | None = None
    prepaid_only: bool | None = None
    anchor_day: int | None = Field(None, ge=1, le=31)
    timezone: str | None = Field(None, max_length=64)
    payment_terms_days: int | None = Field(
        None, ge=0, le=365, description="Days to pay in place of the plan's; null: the plan's."
    )
    payment_methods: (
        list[Literal["card", "sepa_debit", "us_bank_account", "customer_balance"]] | None
    ) = Field(
        None,
        max_length=4,
        description="At Stripe; customer_balance is a bank transfer. null: as Stripe chooses.",
    )
    collection: Literal["manual", "stripe", "stripe_meters"] | None = None


class NewTaxRate(Body):
    region: str = Field(min_length=2, max_length=20)
    name: str = Field(min_length=1, max_length=120)
    percent: str = Field(pattern=r"^\d{1,2}(\.\d{1,4})?$")
    effective_from: datetime | None = None


class NewExchangeRate(Body):
    day: str = Field(max_length=10, examples=["2026-01-30"])
    base: str = Field(min_length=3, max_length=3, examples=["EUR"])
    quote: str = Field(min_length=3, max_length=3, examples=["USD"])
    rate: str = Field(max_length=40, examples=["1.0834"], description="of one unit of the base")
    replace: bool = False


class ExchangeRateFile(Body):
    csv: str = Field(max_length=1_000_000, description="day,base,quote,rate and a line each")
    replace: bool = False


class BankStatement(Body):
    content: str = Field(
        min_length=1, max_length=8_000_000, description="camt.053 (XML), or CSV with a header"
    )
    columns: dict[str, Annotated[str, Field(max_length=120)]] = Field(
        {},
        description="The file's column for id, date, amount, currency, account, payer, payer_account, "
        "reference or text, if it has another name.",
    )


class BankLineTarget(Body):
    target: str = Field(min_length=1, max_length=120, description="An invoice or a tenant.")


class BankLineReason(Body):
    reason: str = Field(min_length=1, max_length=500)


class NewParent(Body):
    parent: str = Field(max_length=120, description="name or id of the organisation above")
    pays: Literal["parent", "self"] = "self"
    markup_percent: str = Field("0", max_length=20, examples=["12.5"])


class NewEnginePrice(Body):
    pool: str = Field(max_length=80, examples=["h100-*"], description="a pattern of engines' names")
    per_hour: str = Field(max_length=40, examples=["2.50"], description="of one engine")
    currency: str = Field("USD", max_length=3)
    effective_from: date | None = None
    note: str = Field("", max_length=500)


class SellerChange(Body):
    name: str | None = Field(None, min_length=1, max_length=200)
    address: str | None = Field(None, max_length=2000)
    tax_id: str | None = Field(None, max_length=80)
    tax_region: str | None = Field(None, max_length=20, examples=["DE", "US-NY"])
    bank_details: str | None = Field(None, max_length=1000)
    footer: str | None = Field(None, max_length=1000, description="Printed below every invoice.")
    logo: Base64Bytes | None = Field(
        None, max_length=400_000, description="PNG or JPEG in base64; empty removes it."
    )
    number_prefix: str | None = Field(None, pattern=r"^[A-Za-z0-9-]{1,20}$")
    next_number: int | None = Field(
        None, ge=1, description="Number of the first invoice; later ones follow without a gap."
    )


class NewTaxExemption(Body):
    number: str = Field(min_length=1, max_length=80, description="Number of the certificate.")
    region: str = Field("", max_length=20, description="Empty covers every region.")
    valid_from: datetime | None = Field(None, description="Default: now.")
    valid_to: datetime | None = None


class NewCreditNote(Body):
    net_minor: int = Field(gt=0, description="Net amount; its tax is credited in proportion.")
    reason: str = Field(min_length=1, max_length=500)
    reference: str = Field(
        min_length=1, max_length=120, description="Idempotency reference: the same one issues once."
    )
    refund: bool = False


class NewMoneyAct(Body):
    kind: Literal[
        "grant", "credit_note", "refund", "void", "write_off", "wire", "plan", "add_on", "undo"
    ]
    target: str = Field(
        min_length=1,
        max_length=120,
        description="A tenant for grant and plan, a payment for refund, else an invoice; a wire "
        "may name a tenant, whose wallet gets it.",
    )
    reference: str = Field(
        min_length=1,
        max_length=120,
        description="The same one is posted once; a bank's for a wire.",
    )
    amount: str | None = Field(
        None,
        pattern=r"^\d{1,12}(\.\d{1,12})?$",
        description="In major units; net of tax for a credit note. All that is open when omitted.",
    )
    reason: str = Field("", max_length=500)
    terms: dict[str, Any] = Field(
        {},
        description="grant: kind, expires_at, priority; credit_note: refund; plan: plan, seats, "
        "overrides.",
    )


class Rejection(Body):
    reason: str = Field("", max_length=500)


class MonthSignature(Body):
    note: str = Field("", max_length=2000)


class NewOperator(Body):
    name: str = Field(min_length=1, max_length=30, examples=["ann"])
    role: Literal["operator", "accountant"] = "accountant"


class SetupLink(Body):
    return_url: str = Field("", max_length=500)


class NewRefund(Body):
    amount_minor: int | None = Field(
        None, gt=0, description="The refundable remainder when omitted."
    )
    reference: str = Field(min_length=1, max_length=60)
    reason: str = Field("", max_length=500)
