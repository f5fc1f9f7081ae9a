"""Every table, and what the erasure of a tenant does with its rows.

A new table must be named here: a test compares the names with the schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Table, or_, select

from migrations.tables import metadata

_BOOKS = "bookkeeping: what was charged, invoiced and paid, which the law keeps for years"
_COUNTS = "counts and amounts that the audit compares with the books: ids, no names and no texts"
_PROVIDER = "records of payments at the payment provider, which the law keeps for years"


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows stay as they are. `through` is as for `Deleted`."""

    why: str
    through: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deleted:
    """Rows go. `through` has columns and the parents' tables where rows do not name the tenant."""

    through: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emptied:
    """Rows stay without these columns."""

    columns: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Operators:
    """Rows are the operator's own, of no tenant."""


Fate = Kept | Deleted | Emptied | Operators

FATES: dict[str, Fate] = {
    "add_on_holdings": Kept(_BOOKS),
    "adjustments": Kept(_BOOKS),
    "bank_lines": Kept(_BOOKS),
    "billing_accounts": Kept(_BOOKS),
    "billing_periods": Kept(_BOOKS),
    "charges": Kept(_BOOKS),
    "credit_grants": Kept(_BOOKS),
    "credit_notes": Kept(_BOOKS),
    "credit_uses": Kept(_BOOKS),
    "disputes": Kept(_BOOKS),
    "dunning_cases": Kept(_BOOKS),
    "invoices": Kept(_BOOKS),
    "invoice_lines": Kept(_BOOKS, {"invoice_id": "invoices"}),
    "child_invoices": Kept(_BOOKS, {"invoice_id": "invoices"}),
    "ledger_accounts": Kept(_BOOKS),
    "ledger_entries": Kept(_BOOKS, {"transaction_id": "ledger_transactions"}),
    "ledger_transactions": Kept(_BOOKS),
    "money_acts": Kept(_BOOKS),
    "organisation_links": Kept(_BOOKS),
    "payments": Kept(_BOOKS),
    "price_versions": Kept(_BOOKS),
    "refunds": Kept(_BOOKS),
    "reported_events": Kept(_BOOKS),
    "rerates": Kept(_BOOKS),
    "reserved_numbers": Kept(_BOOKS),
    "subscriptions": Kept(_BOOKS),
    "tax_exemptions": Kept(_BOOKS),
    "tier_positions": Kept(_BOOKS),
    "metered_spans": Kept(_BOOKS),
    "payment_customers": Kept(_PROVIDER),
    "payment_methods": Kept(_PROVIDER),
    "payment_outbox": Kept(_PROVIDER),
    "closed_charges": Kept(_COUNTS),
    "engine_time_daily": Kept(_COUNTS),
    "service_daily": Kept(_COUNTS),
    "service_hourly": Kept(_COUNTS),
    "usage_daily": Kept(_COUNTS),
    "usage_hourly": Kept(_COUNTS),
    "usage_engine_daily": Kept(_COUNTS),
    "usage_tenant_daily": Kept(_COUNTS),
    # Sums of named end users become those of no name, once events have lost their names.
    "usage_end_user_daily": Kept(_COUNTS),
    "usage_events": Emptied(("end_user", "client_request_id", "member_id", "labels"), _COUNTS),
    "audit_log": Emptied(
        ("before", "after", "target", "salt"),
        "who did what and when, as evidence; without what was changed",
    ),
    "audit_chains": Kept("shows that no entry of the audit log was changed or taken away"),
    "projects": Emptied(("name", "label_keys"), "invoice lines name projects by id"),
    "tenants": Emptied(("name", "display_name", "settings"), "the books name it by id"),
    "adapters": Deleted(),
    "api_keys": Deleted(),
    "batches": Deleted(),
    "batch_lines": Deleted({"batch_id": "batches"}),
    "budgets": Deleted(),
    "conversations": Deleted(),
    "conversation_items": Deleted({"conversation_id": "conversations"}),
    "dashboard_sessions": Deleted({"member_id": "members", "key_id": "api_keys"}),
    "export_jobs": Deleted(),
    "export_schedules": Deleted(),
    "files": Deleted(),
    "file_chunks": Deleted({"file_id": "files"}),
    "idempotency_records": Deleted(),
    "label_sets": Deleted(),
    "limits": Deleted(),
    "limit_rejections": Deleted(),
    "members": Deleted(),
    "moderation_appeals": Deleted(),
    "moderation_daily": Deleted(),
    "moderation_decisions": Deleted(),
    "moderation_policies": Deleted(),
    "moderation_strikes": Deleted(),
    "moderation_suspensions": Deleted(),
    "outbox": Deleted(),
    "parked_events": Deleted(),
    "prompt_templates": Deleted(),
    "prompt_versions": Deleted({"prompt_id": "prompt_templates"}),
    "stored_completions": Deleted(),
    "stored_responses": Deleted(),
    "stored_response_events": Deleted({"response_id": "stored_responses"}),
    "stored_response_items": Deleted({"response_id": "stored_responses"}),
    "tenant_domains": Deleted(),
    "top_ups": Deleted(),
    # Whole sums are in `usage_hourly`; these have the tenant's own words.
    "usage_label_hourly": Deleted(),
    "sign_on_connections": Deleted(),
    "webhook_endpoints": Deleted(),
    **dict.fromkeys(
        (
            "add_ons",
            "audit_runs",
            "casbin_rule",
            "closed_days",
            "closed_units",
            "dead_letters",
            "engine_drains",
            "engine_prices",
            "engine_receipts",
            "epochs",
            "exchange_rates",
            "limit_plans",
            "moved_days",
            "operators",
            "payment_inbox",
            "plans",
            "queue_heartbeats",
            "rating_shards",
            "rating_workers",
            "recoveries",
            "restore_marks",
            "sellers",
            "signed_months",
            "tax_quotes",
            "tax_rates",
            "usage_batches",
            "usage_retention",
        ),
        Operators(),
    ),
}

# What signs or signs in, or stands for it: no export has it.
SECRET = {
    "authorization",
    "invitation_sha256",
    "password_hash",
    "secret",
    "secret_sha256",
    "webhook_secret",
}
# Of tables in which the tenant has another name than `tenant_id`.
_OWNER = {"tenants": "id"}


def table_of(name: str) -> Table:
    return metadata.tables[name]


def of_tenant(name: str, tenant_id: str) -> ColumnElement[bool]:
    """The condition of a tenant's rows in a table."""
    table, fate = table_of(name), FATES[name]
    through = fate.through if isinstance(fate, Kept | Deleted) else {}
    if not through:
        return table.c[_OWNER.get(name, "tenant_id")] == tenant_id
    return or_(
        *(
            table.c[column].in_(select(table_of(parent).c.id).where(of_tenant(parent, tenant_id)))
            for column, parent in through.items()
        )
    )


def names_of_tenants() -> list[str]:
    """Tables with rows of tenants, parents before children."""
    return [
        each.name for each in metadata.sorted_tables if not isinstance(FATES[each.name], Operators)
    ]
