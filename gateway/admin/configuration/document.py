"""What a configuration file says. A field that it leaves out is not managed: it stays as it is.

The JSON Schema of `Configuration` is what `tollhouse apply --schema` prints for editors.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from billing.notices.budgets import SCOPES, WINDOWS
from core.errors import BadRequest
from core.tenants.organisations import STATUSES
from gateway.admin.schemas import PlanBody, Role

Amount = str | int  # of the currency's major unit; decimals as text, since money is never a float
Rate = (
    Amount | dict[str, object] | None
)  # the forms of `billing.pricing.price_terms`; None removes it
_NAME = Field(min_length=1, max_length=120)


class Number(str):
    """A decimal as the file writes it: money is read from its digits, a threshold as a float."""

    __slots__ = ()


def _plain(value: object) -> object:
    if isinstance(value, Number):
        return float(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    def stated(self) -> dict[str, object]:
        """The fields that the file states, without the name that identifies the entry."""
        return {name: getattr(self, name) for name in self.model_fields_set if name != "name"}


class LimitPlan(PlanBody):
    """Limits, priority and weight, by the name that tenants have as `plan`."""

    name: str = _NAME


class BillingPlan(Part):
    """Fees and commitments to which tenants subscribe. A plan never changes: give a new name."""

    name: str = _NAME
    currency: str = "USD"
    interval: Literal["month", "year"] = "month"
    commitment_interval: Literal["month", "year"] | None = None
    in_advance: bool = False
    base_fee: Amount = 0
    seat_fee: Amount = 0
    included_usage: Amount = 0
    minimum_commitment: Amount = 0
    included_seats: int = Field(0, ge=0)
    trial_days: int = Field(0, ge=0, le=3650)
    grace_hours: int = Field(24, ge=0, le=24 * 28)
    payment_terms_days: int = Field(14, ge=0, le=365)
    suspend_after_days: int | None = Field(None, ge=0, le=365)
    limits_plan: str | None = None


class Price(Part):
    """All rates of a model: those that the list leaves out are removed. Without `from` it is the price
    in force, and a difference begins a new version now; past prices never change."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    model: str = Field(min_length=1, max_length=120, description="A public name, or * for all.")
    adapter: str = "*"
    currency: str = "USD"
    rates: dict[str, Rate] = Field(min_length=1)
    discount_percent: str = "0"
    start: str | None = Field(None, alias="from", description="ISO 8601; default: now.")
    note: str = ""


class Billing(Part):
    legal_name: str | None = None
    address: str | None = None
    email: str | None = None
    tax_id: str | None = None
    tax_region: str | None = None
    postal_code: str | None = None
    tax_exempt: bool | None = None
    collection: Literal["manual", "stripe", "stripe_meters"] | None = None
    anchor_day: int | None = Field(None, ge=1, le=31)
    payment_terms_days: int | None = Field(None, ge=0, le=365)


class Subscription(Part):
    plan: str
    seats: int = Field(0, ge=0)


class Member(Part):
    """Without a password: send an invitation with `tollhouse member invite`."""

    email: str = Field(min_length=3, max_length=320)
    role: Role
    name: str = ""


class Key(Part):
    """An API key by its name. `secret_file` is where the secret of a new key is written (mode 0600)."""

    name: str = _NAME
    id: str | None = Field(None, description="Where two keys have the same name.")
    project: str = "default"
    role: Role = "developer"
    models: list[str] | None = None
    adapters: list[str] | None = None
    routes: list[str] | None = None
    allowed_ips: list[str] = Field(default_factory=list)
    expires_at: str | None = None
    fallback: Literal["off"] | dict[str, list[str]] | None = None
    canary: dict[str, dict[str, int]] | None = None
    secret_file: str | None = None


class Limit(Part):
    """A limit of the tenant's own. `target` is a project, key or model by name, empty: each of them; or
    a label such as team=search."""

    scope: Literal["tenant", "project", "key", "model", "label"]
    unit: Literal["requests", "input_tokens", "output_tokens", "total_tokens", "concurrent"]
    limit: int = Field(gt=0, le=10**12)
    period_s: Literal[0, 60, 3_600, 86_400] = 60
    target: str = ""
    shadow: bool = False


class Budget(Part):
    """A spending cap by its name. A change ends the budget and begins another."""

    name: str = _NAME
    cap: Amount
    scope: Literal["tenant", "project", "key", "label"] = "tenant"
    target: str = Field("", description="The project or key by name, or a label: team=search.")
    window: Literal["day", "week", "month", "total"] = "month"
    hard: bool = True
    thresholds: list[int] = Field(default_factory=lambda: [50, 80, 100])
    webhooks: list[str] = Field(default_factory=list)
    emails: list[str] = Field(default_factory=list)


class ModerationPolicy(Part):
    level: Literal["tenant", "project", "key"] = "tenant"
    target: str = Field("", description="The project or key by name.")
    document: Annotated[dict[str, object], BeforeValidator(_plain)]


class Webhook(Part):
    """An endpoint by its URL. `secret_file` is where the secret of a new one is written (mode 0600)."""

    url: str = Field(min_length=1, max_length=1024)
    events: list[str] = Field(default_factory=list, description="Empty: all events.")
    secret_file: str | None = None


class TenantPart(Part):
    name: str = _NAME
    display_name: str = Field("", max_length=200)
    plan: str = "standard"
    status: Literal["active", "suspended", "closed"] = "active"
    currency: str = "USD"
    timezone: str = "UTC"
    fallback: Literal["off"] | dict[str, list[str]] | None = None
    canary: dict[str, dict[str, int]] | None = None
    billing: Billing | None = None
    subscription: Subscription | None = None
    projects: list[str] = Field(default_factory=list)
    labels: dict[str, list[str]] = Field(
        default_factory=dict, description="By project, the names that its requests may have."
    )
    members: list[Member] = Field(default_factory=list)
    keys: list[Key] = Field(default_factory=list)
    limits: list[Limit] = Field(default_factory=list)
    budgets: list[Budget] = Field(default_factory=list)
    policies: list[ModerationPolicy] = Field(default_factory=list)
    webhooks: list[Webhook] = Field(default_factory=list)
    prices: list[Price] = Field(default_factory=list, description="Negotiated prices.")


class Configuration(Part):
    limit_plans: list[LimitPlan] = Field(default_factory=list)
    billing_plans: list[BillingPlan] = Field(default_factory=list)
    prices: list[Price] = Field(default_factory=list, description="List prices.")
    tenants: list[TenantPart] = Field(default_factory=list)


assert set(STATUSES) == {"active", "suspended", "closed"}
assert set(SCOPES) == {"tenant", "project", "key", "label"} and set(WINDOWS) == {
    "day",
    "week",
    "month",
    "total",
}


def once(entries: list[str], what: str) -> None:
    """BadRequest for a name that the file states twice."""
    twice = sorted({each for each in entries if entries.count(each) > 1})
    if twice:
        raise BadRequest(
            f"{what} {twice[0]!r} is stated twice.", next_step="Keep one of the two entries."
        )
