"""Request bodies of the admin routes. Unknown fields are refused."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from billing.adjustments.onboarding import BillingDetails, Customer, Owner
from core.tenants.passwords import PasswordHash

Role = Literal["owner", "admin", "finance", "developer", "viewer"]
Name = Field(min_length=1, max_length=120)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewOwner(_Body):
    email: str = Field(max_length=320)
    name: str = Field("", max_length=200)
    password: str | None = Field(
        None, min_length=10, max_length=1024, description="Empty: single sign-on only."
    )


class TenantErasureBody(_Body):
    confirm: str = Field(max_length=120, description="The tenant's name once more.")


class NewTenant(_Body):
    name: str = Field(
        min_length=1, max_length=63, description="Lower-case letters, digits and hyphens."
    )
    display_name: str = Field("", max_length=200)
    plan: str = "standard"
    currency: str = "USD"
    timezone: str = Field("UTC", max_length=64)

    legal_name: str = Field("", max_length=200, description="On invoices.")
    address: str = Field("", max_length=2000)
    email: str = Field("", max_length=320, description="For invoices.")
    tax_id: str = Field("", max_length=80)
    tax_region: str = Field("", max_length=20, description="Such as DE or US-NY.")
    tax_exempt: bool = False
    owner: NewOwner | None = None
    project: str = Field("default", min_length=1, max_length=63)
    key: str = Field("", max_length=120, description="Name of the first key; empty for none.")

    def customer(self, password_hash: PasswordHash | None) -> Customer:
        """`password_hash` is that of the owner's password."""
        details = ("legal_name", "address", "email", "tax_id", "tax_region", "tax_exempt")
        plain = ("name", "display_name", "plan", "currency", "timezone", "project", "key")
        owner = None
        if self.owner is not None:
            owner = Owner(self.owner.email, self.owner.name, password_hash)
        return Customer(
            **{name: getattr(self, name) for name in plain},
            billing=BillingDetails(**{name: getattr(self, name) for name in details}),
            owner=owner,
        )


class TenantChange(_Body):
    display_name: str | None = Field(None, min_length=1, max_length=200)
    settings: dict[str, Any] | None = Field(
        None, description="Merged into the settings; null removes a name."
    )
    plan: str | None = Field(None, description="Only the operator can change it.")
    status: Literal["active", "suspended", "closed"] | None = Field(
        None, description="Only the operator can change it."
    )


class CacheRuleBody(_Body):
    ttl_s: int = Field(3_600, ge=1, le=86_400, description="How long an answer is given again.")
    sampled: bool = Field(False, description="Also of requests with a temperature above 0.")
    tools: bool = Field(False, description="Also of requests with tools.")


class AuditStreamBody(_Body):
    url: str = Field(min_length=1, max_length=1_000, description="https://host/path")
    whole: bool = Field(False, description="Begin with the first entry, not with the next.")


class RequestLogBody(_Body):
    url: str = Field(min_length=1, max_length=2_000, description="https://host/path")
    content: bool = Field(
        False, description="Also the texts of prompt and answer, as moderation left them."
    )
    format: Literal["records", "otlp"] = Field(
        "records", description="otlp: traces in JSON with OpenTelemetry's names for generative AI."
    )
    sample_percent: int = Field(100, ge=1, le=100, description="Share of the requests.")
    authorization: str | None = Field(
        None, max_length=400, description="Authorization header that the receiver asks for."
    )


class NewProject(_Body):
    name: str = Field(min_length=1, max_length=63)


class LabelKeys(_Body):
    label_keys: list[str] = Field(
        max_length=5, description="Such as team and feature; none: no labels."
    )


class NewMember(_Body):
    email: str = Field(max_length=320)
    role: Role
    name: str = Field("", max_length=200)
    password: str | None = Field(None, min_length=10, max_length=1024)


class MemberChange(_Body):
    role: Role | None = None
    name: str | None = Field(None, max_length=200)
    disabled: bool | None = None
    keep_keys: bool = Field(
        False,
        description="While disabling: the member's keys work on, and the caller answers for them.",
    )


class SignOnBody(_Body):
    issuer: str = Field(max_length=1_000, description="Such as https://login.example.com.")
    client_id: str = Field(max_length=400)
    client_secret: str | None = Field(None, max_length=400, description="Null: as it is.")
    new_member_role: str | None = Field(
        None,
        max_length=20,
        description="Of people who are not members yet; null: members are invited.",
    )


class SignOnForce(_Body):
    forced: bool
    break_glass: str = Field(
        "", max_length=320, description="E-mail address of an owner who keeps a password."
    )


class NewPassword(_Body):
    password: str = Field(min_length=10, max_length=1024)


class Scopes(_Body):
    models: list[str] | None = None
    adapters: list[str] | None = None
    routes: list[str] | None = Field(
        None, description="For example `/v1/chat/completions` or `/v1/*`."
    )


class Routing(_Body):
    """Fallback chains and canaries of a key, in place of the tenant's."""

    fallback: Any = Field(
        None, description='"off", or models to try in turn: `{"small": ["large"]}`.'
    )
    canary: Any = Field(
        None,
        description='Percent of a model\'s conversations for others: `{"small": {"large": 5}}`.',
    )


class KeyChange(_Body):
    scopes: Scopes | None = Field(None, description="Merged by name; null removes a bound.")
    routing: Routing | None = Field(None, description="Merged by name; null removes it.")
    name: str | None = Field(None, min_length=1, max_length=120)
    allowed_ips: list[str] | None = Field(
        None, max_length=100, description="In place of those so far; none: any address."
    )
    expires_at: datetime | None = Field(None, description="Null: the key does not expire.")


class NewKey(_Body):
    project_id: str = Field(max_length=40)
    name: str = Name
    role: Role = "developer"
    scopes: Scopes = Field(default_factory=lambda: Scopes(routes=None))
    allowed_ips: list[str] = Field([], max_length=100)
    expires_at: datetime | None = None
    routing: Routing | None = None


class PromptMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str = Field(min_length=1, description="With placeholders such as `{{customer}}`.")


class NewPromptVersion(_Body):
    messages: list[PromptMessage] = Field(min_length=1, max_length=64)
    current: bool = Field(True, description="Requests without a version use it from now on.")


class NewPrompt(_Body):
    name: str = Name
    messages: list[PromptMessage] = Field(min_length=1, max_length=64)


class PromptChange(_Body):
    current_version: int = Field(ge=1, le=1_000)


class KeyRotation(_Body):
    overlap_s: int = Field(86_400, ge=0, le=90 * 86_400)


class NewLimit(_Body):
    scope: Literal["tenant", "project", "key", "model", "label"]
    unit: Literal["requests", "input_tokens", "output_tokens", "total_tokens", "concurrent"]
    limit: int = Field(gt=0, le=10**12)
    period_s: Literal[60, 3_600, 86_400] = 60
    target: str = Field(
        "",
        max_length=120,
        description="One project, key or model, empty for each of them; or a label, team=search.",
    )
    shadow: bool = Field(False, description="Count and report without refusing requests.")


class PlanLimit(_Body):
    scope: Literal["tenant", "project", "key", "model"]
    unit: Literal["requests", "input_tokens", "output_tokens", "total_tokens", "concurrent"]
    limit: int = Field(gt=0, le=10**12)
    period_s: Literal[0, 60, 3_600, 86_400] = Field(60, description="0 for the unit concurrent.")
    shadow: bool = False


class PlanBody(_Body):
    limits: list[PlanLimit] = Field(max_length=64)
    priority: int = Field(
        1, ge=0, le=9, description="At full capacity, priority 0 is refused first."
    )
    weight: int = Field(1, ge=1, le=1000)
    cached_permille: int = Field(
        1000, ge=0, le=1000, description="Weight of a cached token in limits, in thousandths."
    )
    queue_wait_s: float = Field(
        0.0, ge=0, le=600, description="Longest wait for a limit; 0: refuse at once."
    )
    queue_length: int = Field(0, ge=0, le=100_000)
    expected_output: int = Field(256, ge=1, le=100_000)
    storage_mb: int = Field(
        10_240, ge=0, le=10**9, description="MiB that the API stores for a tenant, at most."
    )


class EngineName(_Body):
    engine: str = Field(min_length=1, max_length=80)


class UpstreamsDigest(_Body):
    digest: str = Field(min_length=1, max_length=64, description="Of the list that was shown.")


class Permission(_Body):
    role: str = Field(min_length=1, max_length=40)
    obj: str = Field(min_length=1, max_length=40)
    act: Literal["read", "write", "*"]


class AdapterFromPath(_Body):
    name: str = Name
    path: str = Field(max_length=1024)
    base_model: str = Field(max_length=120)


class NewAppeal(_Body):
    request_id: str = Field(min_length=1, max_length=80)
    direction: Literal["input", "output"] = "input"
    reason: str = Field(min_length=1, max_length=2_000)


class Ruling(_Body):
    grant: bool
    answer: str = Field("", max_length=2_000)
