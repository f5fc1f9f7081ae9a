"""Tables of tenants, projects, keys, members, sessions, adapters, limits and the audit log.

A tenant is an organisation. Other packages refer to it by id only.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, BigKey, Json, UtcDateTime
from core.sealed_columns import SealedText

ID = String(40)
NAME = String(120)
LONGEST_TARGET = 120  # of an audit entry; longer ones are cut, `before` and `after` have the whole


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    name: Mapped[str] = mapped_column(NAME, unique=True)  # slug: lower case, digits, hyphens
    display_name: Mapped[str] = mapped_column(String(200))
    plan: Mapped[str] = mapped_column(NAME, default="standard")
    # active | unpaid (keys may read usage and billing but not run inference) | suspended | closed
    status: Mapped[str] = mapped_column(String(20), default="active")
    currency: Mapped[str] = mapped_column(String(3), default="USD")
    timezone: Mapped[str] = mapped_column(String(64), default="UTC")
    settings: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Project(Base):
    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(NAME)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    archived_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # The labels that its requests may carry: see `core.labels`.
    label_keys: Mapped[list[str]] = mapped_column(Json, default=list, server_default="[]")


class ApiKey(Base):
    __tablename__ = "api_keys"
    __table_args__ = (Index("ix_api_keys_tenant_project", "tenant_id", "project_id"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    project_id: Mapped[str] = mapped_column(ID, ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(NAME)
    secret_sha256: Mapped[str] = mapped_column(String(64), unique=True)
    last_four: Mapped[str] = mapped_column(String(4))
    role: Mapped[str] = mapped_column(String(20), default="developer")
    scopes: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)  # models, adapters, routes
    # Fallback chains and canaries, which take the place of the tenant's.
    routing: Mapped[dict[str, Any] | None] = mapped_column(Json)
    allowed_ips: Mapped[list[str]] = mapped_column(Json, default=list)  # CIDR; empty: any address
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(ID, default="")
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    rotated_to: Mapped[str | None] = mapped_column(ID)
    # The first key of a chain of rotations; None for that key itself.
    origin_id: Mapped[str | None] = mapped_column(ID)
    # The member who answers for the key: it works while that member is enabled.
    member_id: Mapped[str | None] = mapped_column(ID)

    @property
    def first_id(self) -> str:
        """The id to which budgets, limits and policies of the key are attached."""
        return self.origin_id or self.id


class PromptTemplate(Base):
    __tablename__ = "prompt_templates"
    __table_args__ = (Index("ix_prompt_templates_tenant_name", "tenant_id", "name"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(NAME)
    current_version: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    removed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class PromptVersion(Base):
    """Never changed; deleted with its template."""

    __tablename__ = "prompt_versions"

    prompt_id: Mapped[str] = mapped_column(ID, ForeignKey("prompt_templates.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    messages: Mapped[list[dict[str, str]]] = mapped_column(Json)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(ID)


class Member(Base):
    __tablename__ = "members"
    __table_args__ = (
        UniqueConstraint("tenant_id", "email"),
        Index("ix_members_tenant_subject", "tenant_id", "oidc_subject", unique=True),
        Index("ix_members_invitation", "invitation_sha256", unique=True),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    email: Mapped[str] = mapped_column(String(320))  # lower case
    name: Mapped[str] = mapped_column(String(200), default="")
    role: Mapped[str] = mapped_column(String(20))  # owner | admin | finance | developer | viewer
    password_hash: Mapped[str | None] = mapped_column(String(200))  # argon2id
    oidc_subject: Mapped[str | None] = mapped_column(String(255))
    invitation_sha256: Mapped[str | None] = mapped_column(String(64))
    invitation_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_seen_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # The role of the person who set the password for the member; None if the member did.
    password_by: Mapped[str | None] = mapped_column(String(20))
    # The role of the person who saw the link of the invitation; None if it was only mailed.
    invitation_by: Mapped[str | None] = mapped_column(String(20))
    # The role of the person who saw the link by which `oidc_subject` was linked; None as above.
    oidc_by: Mapped[str | None] = mapped_column(String(20))


class TenantDomain(Base):
    """An e-mail domain that a tenant has proved to the operator to be its own."""

    __tablename__ = "tenant_domains"

    domain: Mapped[str] = mapped_column(String(253), primary_key=True)  # lower case
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    proved_at: Mapped[datetime] = mapped_column(UtcDateTime)


class SignOnConnection(Base):
    """A tenant's own issuer of OpenID Connect."""

    __tablename__ = "sign_on_connections"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"), unique=True)
    issuer: Mapped[str] = mapped_column(String(1024))
    client_id: Mapped[str] = mapped_column(String(400))
    client_secret: Mapped[str] = mapped_column(SealedText("sign_on_connections.client_secret"))
    new_member_role: Mapped[str | None] = mapped_column(String(20))  # None: members are invited
    forced: Mapped[bool] = mapped_column(default=False)  # the only way in, but for one owner
    break_glass_id: Mapped[str | None] = mapped_column(ID)  # that owner
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    tested_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class DashboardSession(Base):
    """A signed-in browser. The cookie holds the secret, the table its hash."""

    __tablename__ = "dashboard_sessions"

    secret_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    member_id: Mapped[str | None] = mapped_column(ID, ForeignKey("members.id"))
    key_id: Mapped[str | None] = mapped_column(ID, ForeignKey("api_keys.id"))
    operator: Mapped[bool] = mapped_column(default=False)
    operator_name: Mapped[str | None] = mapped_column(ID)  # None: the deployment's own token
    # The tenant whose pages the operator views; None: the oldest tenant.
    chosen_tenant: Mapped[str | None] = mapped_column(ID, ForeignKey("tenants.id"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Operator(Base):
    """A named operator of the deployment, with a token of their own."""

    __tablename__ = "operators"

    name: Mapped[str] = mapped_column(ID, primary_key=True)
    role: Mapped[str] = mapped_column(String(20))  # operator | accountant
    secret_sha256: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(ID)
    disabled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Adapter(Base):
    """A LoRA adapter of a tenant. It is identified by its digest, not its name."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        CheckConstraint("rank > 0", name="rank_positive"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(NAME)
    base_model: Mapped[str] = mapped_column(NAME)
    digest: Mapped[str] = mapped_column(String(64))
    path: Mapped[str] = mapped_column(String(1024))
    rank: Mapped[int]
    bytes: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(ID, default="")
    removed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    quarantined_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    quarantine_reason: Mapped[str] = mapped_column(NAME, default="", server_default="")


class LimitRow(Base):
    """A limit of one tenant, in addition to those of its plan."""

    __tablename__ = "limits"
    __table_args__ = (
        UniqueConstraint("tenant_id", "scope", "unit", "period_s", "target"),
        CheckConstraint("limit_count > 0", name="limit_positive"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID, ForeignKey("tenants.id"))
    scope: Mapped[str] = mapped_column(String(20))  # tenant | project | key | model | label
    unit: Mapped[str] = mapped_column(String(20))
    period_s: Mapped[int]  # seconds; 0 for concurrent requests
    target: Mapped[str] = mapped_column(NAME, default="")
    limit_count: Mapped[int] = mapped_column(BigInteger)
    shadow: Mapped[bool] = mapped_column(default=False)
    by_operator: Mapped[bool] = mapped_column(default=False)  # the tenant may not change it


class RejectionRow(Base):
    """Requests of a tenant that limits rejected or delayed, per hour and reason."""

    __tablename__ = "limit_rejections"

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the hour
    reason: Mapped[str] = mapped_column(NAME, primary_key=True)
    rejected: Mapped[int] = mapped_column(BigInteger, default=0)
    queued: Mapped[int] = mapped_column(BigInteger, default=0)
    queued_ms: Mapped[int] = mapped_column(BigInteger, default=0)


class PlanRow(Base):
    """A plan stored by the operator: a new one, or a replacement of a built-in plan."""

    __tablename__ = "limit_plans"

    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    body: Mapped[dict[str, Any]] = mapped_column(Json)


class PolicyRule(Base):
    """One rule of the role policy, in the columns of casbin's SQLAlchemy adapter."""

    __tablename__ = "casbin_rule"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    ptype: Mapped[str] = mapped_column(String(20))
    v0: Mapped[str | None] = mapped_column(String(255))
    v1: Mapped[str | None] = mapped_column(String(255))
    v2: Mapped[str | None] = mapped_column(String(255))
    v3: Mapped[str | None] = mapped_column(String(255))
    v4: Mapped[str | None] = mapped_column(String(255))
    v5: Mapped[str | None] = mapped_column(String(255))

    def __str__(self) -> str:
        values = (self.v0, self.v1, self.v2, self.v3, self.v4, self.v5)
        return ", ".join([self.ptype, *(value for value in values if value is not None)])


class Epoch(Base):
    """A counter that every change of keys, plans, limits or roles increments. Gateways poll it."""

    __tablename__ = "epochs"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, default=0)


class AuditEntry(Base):
    """One change: actor, action, target, state before and after. Append-only."""

    __tablename__ = "audit_log"
    __table_args__ = (Index("ix_audit_log_tenant_at", "tenant_id", "at"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str | None] = mapped_column(ID)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor: Mapped[str] = mapped_column(String(120))  # member id, key id, "operator", "system"
    action: Mapped[str] = mapped_column(String(80))  # "key.create"
    target: Mapped[str] = mapped_column(String(LONGEST_TARGET))
    before: Mapped[dict[str, Any] | None] = mapped_column(Json)
    after: Mapped[dict[str, Any] | None] = mapped_column(Json)
    request_id: Mapped[str] = mapped_column(ID, default="")
    # Of the hash chain (`core.tenants.audit_chain`); empty in entries from before it.
    salt: Mapped[str] = mapped_column(String(32), default="", server_default="")
    content_sha256: Mapped[str] = mapped_column(String(64), default="", server_default="")
    digest: Mapped[str] = mapped_column(String(64), default="", server_default="")


class AuditChain(Base):
    """The end of the hash chain of a tenant's audit log; the operator's has an empty `tenant_id`."""

    __tablename__ = "audit_chains"

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    entries: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(64))
