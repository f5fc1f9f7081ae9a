"""The tables of billing, their partitions, and the triggers that refuse changes of what is final."""

import sqlalchemy as sa
from alembic import op

from migrations.column_types import BigKey, Json, OrderedId, Units, UtcDateTime

revision = "0002_billing"
down_revision = "0001_core"
branch_labels = None
depends_on = None
SHARDS = 16

PARTITIONED = ("usage_events", "charges", "engine_receipts")
APPEND_ONLY = (
    *("ledger_transactions", "ledger_entries", "usage_events", "charges", "adjustments"),
    *("credit_uses", "credit_notes", "engine_receipts", "closed_days", "closed_charges"),
    *("closed_units", "reported_events"),
)
# What stays as it is once an invoice is final.
FROZEN = (
    *("number", "tenant_id", "seller_id", "period_id", "currency", "subtotal_minor", "promo_minor"),
    *("tax_minor", "total_minor", "prepaid_minor", "due_minor", "exact", "final_at"),
)


def upgrade() -> None:
    op.create_table(
        "add_on_holdings",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("add_on_id", sa.String(40), nullable=False),
        sa.Column("quantity", sa.Integer, nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("quantity > 0", name=op.f("ck_add_on_holdings_quantity_positive")),
        sa.PrimaryKeyConstraint("id", name="pk_add_on_holdings"),
    )
    op.create_index("ix_add_on_holdings_tenant", "add_on_holdings", ["tenant_id", "starts_at"])
    op.create_table(
        "add_ons",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("fee", Units, nullable=False),
        sa.Column("interval", sa.String(10), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_add_ons"),
        sa.UniqueConstraint("name", name="uq_add_ons_name"),
    )
    op.create_table(
        "adjustments",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("rerate_id", sa.String(40), nullable=True),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("component", sa.String(20), nullable=False),
        sa.Column("quantity", sa.BigInteger, nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("bill_period_id", sa.String(40), nullable=False),
        sa.Column("transaction_id", sa.String(40), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adjustments"),
    )
    op.create_index("ix_adjustments_bill_period", "adjustments", ["bill_period_id"])
    op.create_table(
        "audit_runs",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("clean", sa.Boolean, nullable=False),
        sa.Column("report", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_runs"),
    )
    op.create_index("ix_audit_runs_at", "audit_runs", ["at"])
    op.create_table(
        "bank_lines",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("account", sa.String(40), nullable=False),
        sa.Column("bank_id", sa.String(140), nullable=False),
        sa.Column("booked_on", sa.Date(), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger, nullable=False),
        sa.Column("payer", sa.String(200), nullable=False),
        sa.Column("payer_account", sa.String(40), nullable=False),
        sa.Column("reference", sa.String(140), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("acts", Json, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("imported_at", UtcDateTime, nullable=False),
        sa.Column("imported_by", sa.String(40), nullable=False),
        sa.Column("decided_by", sa.String(40), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_bank_lines"),
        sa.UniqueConstraint("account", "bank_id", name="uq_bank_lines_account_bank_id"),
    )
    op.create_index("ix_bank_lines_status", "bank_lines", ["status", "booked_on"])
    op.create_table(
        "billing_accounts",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("seller_id", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("anchor_day", sa.Integer, nullable=False),
        sa.Column("anchored_at", UtcDateTime, nullable=True),
        sa.Column("legal_name", sa.String(200), nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("email", sa.String(320), nullable=False),
        sa.Column("tax_id", sa.String(80), nullable=False),
        sa.Column("tax_region", sa.String(20), nullable=False),
        sa.Column("postal_code", sa.String(20), server_default="", nullable=False),
        sa.Column("tax_exempt", sa.Boolean, nullable=False),
        sa.Column("collection", sa.String(20), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("prepaid_only", sa.Boolean, nullable=False),
        sa.Column("payment_reference", sa.String(25), nullable=True),
        sa.Column("payment_terms_days", sa.Integer, nullable=True),
        sa.Column("payment_methods", Json, nullable=True),
        sa.Column("limits_set", sa.String(120), nullable=True),
        sa.Column("limits_before", sa.String(120), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.CheckConstraint(
            "anchor_day between 1 and 31", name=op.f("ck_billing_accounts_anchor_day")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_billing_accounts"),
    )
    op.create_index(
        "ix_billing_accounts_payment_reference", "billing_accounts", ["payment_reference"]
    )
    op.create_table(
        "billing_periods",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.Column("whole_from", UtcDateTime, nullable=True),
        sa.Column("whole_to", UtcDateTime, nullable=True),
        sa.CheckConstraint("ends_at > starts_at", name=op.f("ck_billing_periods_ends_after_start")),
        sa.PrimaryKeyConstraint("id", name="pk_billing_periods"),
        sa.UniqueConstraint(
            "tenant_id", "starts_at", name="uq_billing_periods_tenant_id_starts_at"
        ),
    )
    op.create_index("ix_billing_periods_open", "billing_periods", ["closed_at", "ends_at"])
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("scope", sa.String(20), nullable=False),
        sa.Column("scope_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("cap", Units, nullable=False),
        sa.Column("window", sa.String(20), nullable=False),
        sa.Column("hard", sa.Boolean, nullable=False),
        sa.Column("thresholds", Json, nullable=False),
        sa.Column("webhooks", Json, nullable=False),
        sa.Column("emails", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.Column("webhook_secret", sa.String(80), nullable=True),
        sa.CheckConstraint("cap > 0", name=op.f("ck_budgets_cap_positive")),
        sa.PrimaryKeyConstraint("id", name="pk_budgets"),
    )
    op.create_index("ix_budgets_tenant", "budgets", ["tenant_id"])
    op.create_table(
        "charges",
        sa.Column("request_id", OrderedId, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("bill_period_id", sa.String(40), nullable=False),
        sa.Column("transaction_id", sa.String(40), nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint("request_id", name="pk_charges"),
        postgresql_partition_by="RANGE (request_id)",
    )
    op.create_index("ix_charges_bill_period", "charges", ["bill_period_id"])
    op.create_index("ix_charges_transaction", "charges", ["transaction_id"])
    op.create_table(
        "child_invoices",
        sa.Column("invoice_id", sa.String(40), nullable=False),
        sa.Column("parent_id", sa.String(40), nullable=False),
        sa.Column("child_id", sa.String(40), nullable=False),
        sa.Column("pays", sa.String(10), nullable=False),
        sa.Column("period_start", UtcDateTime, nullable=False),
        sa.Column("period_end", UtcDateTime, nullable=False),
        sa.Column("charged_minor", sa.BigInteger, nullable=False),
        sa.Column("markup_minor", sa.BigInteger, nullable=False),
        sa.Column("billed_by", sa.String(40), nullable=True),
        sa.Column("markup_promo_minor", sa.BigInteger, server_default="0", nullable=False),
        sa.Column("passed_minor", sa.BigInteger, server_default="0", nullable=False),
        sa.Column("promo_passed_minor", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("invoice_id", name="pk_child_invoices"),
    )
    op.create_index("ix_child_invoices_parent", "child_invoices", ["parent_id", "billed_by"])
    op.create_table(
        "closed_charges",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("bill_period_id", sa.String(40), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("tokens", sa.Boolean, nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "day",
            "tenant_id",
            "usage_period_id",
            "bill_period_id",
            "price_version",
            "tokens",
            name="pk_closed_charges",
        ),
    )
    op.create_index("ix_closed_charges_bill_period", "closed_charges", ["bill_period_id"])
    op.create_index("ix_closed_charges_usage_period", "closed_charges", ["usage_period_id"])
    op.create_table(
        "closed_days",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("last_batch", sa.BigInteger, nullable=False),
        sa.Column("sums", Json, nullable=False),
        sa.Column("frozen", Json, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("signature", sa.String(100), nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("day", name="pk_closed_days"),
    )
    op.create_table(
        "closed_units",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("key", sa.String(40), nullable=False),
        sa.Column("units", Units, nullable=False),
        sa.PrimaryKeyConstraint("day", "kind", "key", name="pk_closed_units"),
    )
    op.create_index("ix_closed_units_key", "closed_units", ["kind", "key"])
    op.create_table(
        "credit_grants",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("granted", Units, nullable=False),
        sa.Column("remaining", Units, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("granted_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=True),
        sa.Column("expired_at", UtcDateTime, nullable=True),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.CheckConstraint(
            "remaining >= 0 and remaining <= granted",
            name=op.f("ck_credit_grants_remaining_in_range"),
        ),
        sa.PrimaryKeyConstraint("id", name="pk_credit_grants"),
        sa.UniqueConstraint("reference", name="uq_credit_grants_reference"),
    )
    op.create_index("ix_credit_grants_tenant", "credit_grants", ["tenant_id", "kind"])
    op.create_table(
        "disputes",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("payment_id", sa.String(40), nullable=True),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(40), nullable=False),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("withdrawn", sa.Boolean, nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_disputes"),
        sa.UniqueConstraint("provider", "external_id", name="uq_disputes_provider_external_id"),
    )
    op.create_table(
        "dunning_cases",
        sa.Column("invoice_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=True),
        sa.Column("suspended_at", UtcDateTime, nullable=True),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.Column("outcome", sa.String(40), nullable=True),
        sa.PrimaryKeyConstraint("invoice_id", name="pk_dunning_cases"),
    )
    op.create_index("ix_dunning_cases_next", "dunning_cases", ["closed_at", "next_at"])
    op.create_table(
        "engine_prices",
        sa.Column("pool", sa.String(120), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("per_hour", Units, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(120), nullable=False),
        sa.PrimaryKeyConstraint("pool", "starts_at", name="pk_engine_prices"),
    )
    op.create_table(
        "engine_receipts",
        sa.Column("request_id", OrderedId, nullable=False),
        sa.Column("engine_id", sa.String(80), nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("generated_tokens", sa.Integer, nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.Column("busy_us", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("request_id", "engine_id", name="pk_engine_receipts"),
        postgresql_partition_by="RANGE (request_id)",
    )
    op.create_table(
        "engine_time_daily",
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("engine_id", sa.String(80), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("answers", sa.BigInteger, nullable=False),
        sa.Column("busy_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "at",
            "tenant_id",
            "model",
            "adapter",
            "engine_id",
            "currency",
            name="pk_engine_time_daily",
        ),
    )
    op.create_table(
        "exchange_rates",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("base", sa.String(3), nullable=False),
        sa.Column("quote", sa.String(3), nullable=False),
        sa.Column("rate", Units, nullable=False),
        sa.Column("recorded_at", UtcDateTime, nullable=False),
        sa.Column("recorded_by", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("day", "base", "quote", name="pk_exchange_rates"),
    )
    op.create_table(
        "export_jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("what", sa.String(20), nullable=False),
        sa.Column("format", sa.String(20), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("destination", sa.String(1024), nullable=False),
        sa.Column("schedule_id", sa.String(40), nullable=True),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=True),
        sa.Column("bytes", sa.BigInteger, nullable=True),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.Column("address", sa.String(1200), nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_export_jobs"),
    )
    op.create_index("ix_export_jobs_due", "export_jobs", ["status", "next_at"])
    op.create_index("ix_export_jobs_tenant", "export_jobs", ["tenant_id", "created_at"])
    op.create_table(
        "export_schedules",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("what", sa.String(20), nullable=False),
        sa.Column("format", sa.String(20), nullable=False),
        sa.Column("destination", sa.String(1024), nullable=False),
        sa.Column("options", Json, nullable=False),
        sa.Column("every", sa.String(20), nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("paused_at", UtcDateTime, nullable=True),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.Column("last_error", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_export_schedules"),
    )
    op.create_table(
        "invoices",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("seller_id", sa.String(40), nullable=False),
        sa.Column("period_id", sa.String(40), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=True),
        sa.Column("label", sa.String(40), nullable=True),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("period_start", UtcDateTime, nullable=False),
        sa.Column("period_end", UtcDateTime, nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("billed_to", Json, nullable=False),
        sa.Column("issued_by", Json, server_default="{}", nullable=False),
        sa.Column("subtotal_minor", sa.BigInteger, nullable=False),
        sa.Column("promo_minor", sa.BigInteger, nullable=False),
        sa.Column("tax_minor", sa.BigInteger, nullable=False),
        sa.Column("total_minor", sa.BigInteger, nullable=False),
        sa.Column("prepaid_minor", sa.BigInteger, nullable=False),
        sa.Column("due_minor", sa.BigInteger, nullable=False),
        sa.Column("paid_minor", sa.BigInteger, nullable=False),
        sa.Column("credited_minor", sa.BigInteger, nullable=False),
        sa.Column("exact", Units, nullable=False),
        sa.Column("drafted_at", UtcDateTime, nullable=False),
        sa.Column("final_at", UtcDateTime, nullable=True),
        sa.Column("due_at", UtcDateTime, nullable=True),
        sa.Column("settled_at", UtcDateTime, nullable=True),
        sa.Column("external_id", sa.String(120), nullable=True),
        sa.Column("pay_page", sa.Text, nullable=False),
        sa.Column("metered", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_invoices"),
        sa.UniqueConstraint("period_id", name="uq_invoices_period_id"),
        sa.UniqueConstraint("seller_id", "number", name="uq_invoices_seller_id_number"),
    )
    op.create_index("ix_invoices_status", "invoices", ["status", "due_at"])
    op.create_index("ix_invoices_tenant", "invoices", ["tenant_id", "period_start"])
    op.create_table(
        "ledger_accounts",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("balance", Units, nullable=False),
        sa.CheckConstraint(
            "kind not in ('prepaid', 'promo') or balance <= 0",
            name=op.f("ck_ledger_accounts_wallet"),
        ),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_accounts"),
        sa.UniqueConstraint(
            "tenant_id", "kind", "currency", name="uq_ledger_accounts_tenant_id_kind_currency"
        ),
    )
    op.create_table(
        "ledger_transactions",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("reverses_id", sa.String(40), nullable=True),
        sa.Column("memo", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_transactions"),
        sa.UniqueConstraint("reference", name="uq_ledger_transactions_reference"),
    )
    op.create_index("ix_ledger_transactions_tenant_at", "ledger_transactions", ["tenant_id", "at"])
    op.create_table(
        "metered_spans",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "starts_at", name="pk_metered_spans"),
    )
    op.create_table(
        "money_acts",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("target", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.Column("terms", Json, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("requested_by", sa.String(40), nullable=False),
        sa.Column("requested_at", UtcDateTime, nullable=False),
        sa.Column("decided_by", sa.String(40), nullable=True),
        sa.Column("decided_at", UtcDateTime, nullable=True),
        sa.Column("decision", sa.Text, nullable=False),
        sa.Column("result", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_money_acts"),
        sa.UniqueConstraint("reference", name="uq_money_acts_reference"),
    )
    op.create_index("ix_money_acts_status", "money_acts", ["status", "requested_at"])
    op.create_index("ix_money_acts_target", "money_acts", ["target"])
    op.create_table(
        "moved_days",
        sa.Column("day", UtcDateTime, nullable=False),
        sa.Column("after_batch", sa.BigInteger, nullable=False),
        sa.Column("last_batch", sa.BigInteger, nullable=False),
        sa.Column("store", sa.String(100), nullable=False),
        sa.Column("floor_id", OrderedId, nullable=False),
        sa.Column("moved_at", UtcDateTime, nullable=True),
        sa.Column("dropped_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("day", name="pk_moved_days"),
    )
    op.create_table(
        "organisation_links",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("parent_id", sa.String(40), nullable=False),
        sa.Column("pays", sa.String(10), nullable=False),
        sa.Column("markup_ppm", sa.BigInteger, nullable=False),
        sa.Column("since", UtcDateTime, nullable=False),
        sa.Column("changed_by", sa.String(40), nullable=False),
        sa.CheckConstraint(
            "tenant_id <> parent_id", name=op.f("ck_organisation_links_not_its_own_parent")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_organisation_links"),
    )
    op.create_index("ix_organisation_links_parent", "organisation_links", ["parent_id"])
    op.create_table(
        "outbox",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("endpoint_id", sa.String(40), nullable=True),
        sa.Column("channel", sa.String(20), nullable=False),
        sa.Column("target", sa.String(1024), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("dedupe", sa.String(200), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.Column("failed", sa.Boolean, nullable=False),
        sa.Column("last_error", sa.Text, nullable=True),
        sa.Column("leased_until", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.UniqueConstraint("dedupe", name="uq_outbox_dedupe"),
    )
    op.create_index("ix_outbox_due", "outbox", ["done_at", "next_at"])
    op.create_index("ix_outbox_tenant", "outbox", ["tenant_id", "id"])
    op.create_table(
        "parked_events",
        sa.Column("request_id", OrderedId, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("code", sa.String(40), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("parked_at", UtcDateTime, nullable=False),
        sa.Column("released_at", UtcDateTime, nullable=True),
        sa.Column("dismissed_by", sa.String(120), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_parked_events"),
    )
    op.create_table(
        "payment_customers",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=False),
        sa.Column("default_method", sa.String(120), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "provider", name="pk_payment_customers"),
        sa.UniqueConstraint(
            "provider", "external_id", name="uq_payment_customers_provider_external_id"
        ),
    )
    op.create_table(
        "payment_inbox",
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=False),
        sa.Column("type", sa.String(80), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("subject_id", sa.String(120), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("occurred_at", UtcDateTime, nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.Column("last_error", sa.Text, nullable=True),
        sa.Column("parked", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("provider", "external_id", name="pk_payment_inbox"),
    )
    op.create_index("ix_payment_inbox_open", "payment_inbox", ["done_at", "next_at"])
    op.create_index("ix_payment_inbox_subject", "payment_inbox", ["provider", "kind", "subject_id"])
    op.create_table(
        "payment_methods",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=False),
        sa.Column("label", sa.String(120), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("detached_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_payment_methods"),
        sa.UniqueConstraint(
            "provider", "external_id", name="uq_payment_methods_provider_external_id"
        ),
    )
    op.create_table(
        "payment_outbox",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("subject_id", sa.String(120), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("progress", Json, nullable=False),
        sa.Column("idempotency_key", sa.String(160), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.Column("failed", sa.Boolean, nullable=False),
        sa.Column("last_error", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_payment_outbox"),
        sa.UniqueConstraint("idempotency_key", name="uq_payment_outbox_idempotency_key"),
    )
    op.create_index("ix_payment_outbox_due", "payment_outbox", ["done_at", "next_at"])
    op.create_table(
        "payments",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("invoice_id", sa.String(40), nullable=True),
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=True),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger, nullable=False),
        sa.Column("refunded_minor", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("failure", sa.Text, nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("settled_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("amount_minor > 0", name=op.f("ck_payments_amount_positive")),
        sa.PrimaryKeyConstraint("id", name="pk_payments"),
        sa.UniqueConstraint("provider", "external_id", name="uq_payments_provider_external_id"),
        sa.UniqueConstraint("reference", name="uq_payments_reference"),
    )
    op.create_index("ix_payments_invoice", "payments", ["invoice_id"])
    op.create_index("ix_payments_tenant", "payments", ["tenant_id", "created_at"])
    op.create_table(
        "plans",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("base_fee", Units, nullable=False),
        sa.Column("seat_fee", Units, nullable=False),
        sa.Column("included_seats", sa.Integer, nullable=False),
        sa.Column("included_usage", Units, nullable=False),
        sa.Column("minimum_commitment", Units, nullable=False),
        sa.Column("interval", sa.String(10), server_default="month", nullable=False),
        sa.Column("in_advance", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.Column("trial_days", sa.Integer, server_default="0", nullable=False),
        sa.Column("grace_hours", sa.Integer, nullable=False),
        sa.Column("payment_terms_days", sa.Integer, nullable=False),
        sa.Column("suspend_after_days", sa.Integer, nullable=True),
        sa.Column("limits_plan", sa.String(120), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("commitment_interval", sa.String(10), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_plans"),
        sa.UniqueConstraint("name", name="uq_plans_name"),
    )
    op.create_table(
        "price_versions",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("effective_from", UtcDateTime, nullable=False),
        sa.Column("effective_to", UtcDateTime, nullable=True),
        sa.Column("terms", Json, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(120), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_price_versions"),
    )
    op.create_index(
        "ix_price_versions_scope",
        "price_versions",
        ["model", "tenant_id", "adapter", "effective_from"],
    )
    shards = op.create_table(
        "rating_shards",
        sa.Column("shard", sa.SmallInteger, autoincrement=False, nullable=False),
        sa.Column("worker", sa.String(40), nullable=True),
        sa.Column("leased_until", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("shard", name="pk_rating_shards"),
    )
    op.create_table(
        "rating_workers",
        sa.Column("worker", sa.String(40), nullable=False),
        sa.Column("alive_until", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("worker", name="pk_rating_workers"),
    )
    op.create_table(
        "recoveries",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("found_at", UtcDateTime, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("finished_at", UtcDateTime, nullable=True),
        sa.Column("report", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_recoveries"),
    )
    op.create_table(
        "refunds",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("payment_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("provider", sa.String(20), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=True),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_refunds"),
        sa.UniqueConstraint("provider", "external_id", name="uq_refunds_provider_external_id"),
        sa.UniqueConstraint("reference", name="uq_refunds_reference"),
    )
    op.create_index("ix_refunds_payment_id", "refunds", ["payment_id"])
    op.create_table(
        "reported_events",
        sa.Column("reporter", sa.String(40), nullable=False),
        sa.Column("source", sa.String(200), nullable=False),
        sa.Column("event_id", sa.String(200), nullable=False),
        sa.Column("request_id", OrderedId, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("reported_by", sa.String(40), nullable=False),
        sa.Column("reported_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("reporter", "source", "event_id", name="pk_reported_events"),
    )
    op.create_table(
        "rerates",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("from_version", sa.String(40), nullable=False),
        sa.Column("to_version", sa.String(40), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("posted_at", UtcDateTime, nullable=False),
        sa.Column("posted_by", sa.String(120), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rerates"),
    )
    op.create_table(
        "reserved_numbers",
        sa.Column("seller_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("label", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("period_start", UtcDateTime, nullable=True),
        sa.Column("document_id", sa.String(40), nullable=False),
        sa.Column("external_id", sa.String(120), nullable=True),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("due_minor", sa.BigInteger, nullable=True),
        sa.Column("issued_at", UtcDateTime, nullable=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("reserved_at", UtcDateTime, nullable=False),
        sa.Column("used_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("seller_id", "kind", "number", name="pk_reserved_numbers"),
    )
    op.create_index("ix_reserved_numbers_tenant", "reserved_numbers", ["tenant_id", "period_start"])
    op.create_table(
        "restore_marks",
        sa.Column("position", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("token", sa.String(40), nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("entry_id", sa.BigInteger, nullable=False),
        sa.Column("audit_id", sa.BigInteger, nullable=False),
        sa.Column("command_id", sa.BigInteger, nullable=False),
        sa.Column("numbers", Json, nullable=False),
        sa.Column("acts_sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("position", name="pk_restore_marks"),
    )
    op.create_table(
        "sellers",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("tax_id", sa.String(80), nullable=False),
        sa.Column("tax_region", sa.String(20), server_default="", nullable=False),
        sa.Column("bank_details", sa.Text, server_default="", nullable=False),
        sa.Column("footer", sa.Text, server_default="", nullable=False),
        sa.Column("logo", sa.LargeBinary, nullable=True),
        sa.Column("number_prefix", sa.String(20), nullable=False),
        sa.Column("next_number", sa.BigInteger, nullable=False),
        sa.Column("next_credit_note", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sellers"),
    )
    op.create_table(
        "service_daily",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("member_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("answers", sa.BigInteger, nullable=False),
        sa.Column("refused", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("queue_ms", sa.BigInteger, nullable=False),
        sa.Column("reordered_cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("first_0", sa.BigInteger, nullable=False),
        sa.Column("first_1", sa.BigInteger, nullable=False),
        sa.Column("first_2", sa.BigInteger, nullable=False),
        sa.Column("first_3", sa.BigInteger, nullable=False),
        sa.Column("first_4", sa.BigInteger, nullable=False),
        sa.Column("first_5", sa.BigInteger, nullable=False),
        sa.Column("first_6", sa.BigInteger, nullable=False),
        sa.Column("first_7", sa.BigInteger, nullable=False),
        sa.Column("first_8", sa.BigInteger, nullable=False),
        sa.Column("first_9", sa.BigInteger, nullable=False),
        sa.Column("first_10", sa.BigInteger, nullable=False),
        sa.Column("first_11", sa.BigInteger, nullable=False),
        sa.Column("speed_0", sa.BigInteger, nullable=False),
        sa.Column("speed_1", sa.BigInteger, nullable=False),
        sa.Column("speed_2", sa.BigInteger, nullable=False),
        sa.Column("speed_3", sa.BigInteger, nullable=False),
        sa.Column("speed_4", sa.BigInteger, nullable=False),
        sa.Column("speed_5", sa.BigInteger, nullable=False),
        sa.Column("speed_6", sa.BigInteger, nullable=False),
        sa.Column("speed_7", sa.BigInteger, nullable=False),
        sa.Column("speed_8", sa.BigInteger, nullable=False),
        sa.Column("speed_9", sa.BigInteger, nullable=False),
        sa.Column("speed_10", sa.BigInteger, nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "at",
            "project_id",
            "key_id",
            "member_id",
            "model",
            "adapter",
            "kind",
            "price_version",
            name="pk_service_daily",
        ),
    )
    op.create_table(
        "service_hourly",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("member_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("answers", sa.BigInteger, nullable=False),
        sa.Column("refused", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("queue_ms", sa.BigInteger, nullable=False),
        sa.Column("reordered_cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("first_0", sa.BigInteger, nullable=False),
        sa.Column("first_1", sa.BigInteger, nullable=False),
        sa.Column("first_2", sa.BigInteger, nullable=False),
        sa.Column("first_3", sa.BigInteger, nullable=False),
        sa.Column("first_4", sa.BigInteger, nullable=False),
        sa.Column("first_5", sa.BigInteger, nullable=False),
        sa.Column("first_6", sa.BigInteger, nullable=False),
        sa.Column("first_7", sa.BigInteger, nullable=False),
        sa.Column("first_8", sa.BigInteger, nullable=False),
        sa.Column("first_9", sa.BigInteger, nullable=False),
        sa.Column("first_10", sa.BigInteger, nullable=False),
        sa.Column("first_11", sa.BigInteger, nullable=False),
        sa.Column("speed_0", sa.BigInteger, nullable=False),
        sa.Column("speed_1", sa.BigInteger, nullable=False),
        sa.Column("speed_2", sa.BigInteger, nullable=False),
        sa.Column("speed_3", sa.BigInteger, nullable=False),
        sa.Column("speed_4", sa.BigInteger, nullable=False),
        sa.Column("speed_5", sa.BigInteger, nullable=False),
        sa.Column("speed_6", sa.BigInteger, nullable=False),
        sa.Column("speed_7", sa.BigInteger, nullable=False),
        sa.Column("speed_8", sa.BigInteger, nullable=False),
        sa.Column("speed_9", sa.BigInteger, nullable=False),
        sa.Column("speed_10", sa.BigInteger, nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "at",
            "project_id",
            "key_id",
            "member_id",
            "model",
            "adapter",
            "kind",
            "price_version",
            name="pk_service_hourly",
        ),
    )
    op.create_table(
        "signed_months",
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("signed_by", sa.String(40), nullable=False),
        sa.Column("signed_at", UtcDateTime, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("checklist", Json, nullable=False),
        sa.Column("balances", Json, nullable=False),
        sa.PrimaryKeyConstraint("month", "signed_by", name="pk_signed_months"),
    )
    op.create_table(
        "subscriptions",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("plan_id", sa.String(40), nullable=False),
        sa.Column("seats", sa.Integer, nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=True),
        sa.Column("billed_from", UtcDateTime, nullable=True),
        sa.Column("overrides", Json, server_default="{}", nullable=False),
        sa.Column("years_since", UtcDateTime, nullable=True),
        sa.CheckConstraint("seats >= 0", name=op.f("ck_subscriptions_seats_not_negative")),
        sa.PrimaryKeyConstraint("id", name="pk_subscriptions"),
        sa.UniqueConstraint("tenant_id", "starts_at", name="uq_subscriptions_tenant_id_starts_at"),
    )
    op.create_table(
        "tax_exemptions",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("number", sa.String(80), nullable=False),
        sa.Column("region", sa.String(20), nullable=False),
        sa.Column("valid_from", UtcDateTime, nullable=False),
        sa.Column("valid_to", UtcDateTime, nullable=True),
        sa.Column("recorded_by", sa.String(40), nullable=False),
        sa.Column("recorded_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tax_exemptions"),
    )
    op.create_index("ix_tax_exemptions_tenant", "tax_exemptions", ["tenant_id", "valid_from"])
    op.create_table(
        "tax_quotes",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("taxes", Json, nullable=False),
        sa.Column("asked_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_tax_quotes"),
    )
    op.create_table(
        "tax_rates",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("region", sa.String(20), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("rate_ppm", sa.Integer, nullable=False),
        sa.Column("effective_from", UtcDateTime, nullable=False),
        sa.Column("effective_to", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tax_rates"),
    )
    op.create_index("ix_tax_rates_region", "tax_rates", ["region", "effective_from"])
    op.create_table(
        "tier_positions",
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("component", sa.String(20), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("quantity", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "usage_period_id", "price_version", "component", name="pk_tier_positions"
        ),
    )
    op.create_table(
        "top_ups",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("threshold", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("pending_reference", sa.String(160), nullable=True),
        sa.Column("last_at", UtcDateTime, nullable=True),
        sa.Column("last_error", sa.String(120), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_top_ups"),
    )
    op.create_table(
        "usage_batches",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("recorded_at", UtcDateTime, nullable=False),
        sa.Column("events", sa.Integer, nullable=False),
        sa.Column("shard", sa.SmallInteger, server_default="0", nullable=False),
        sa.Column("rated_at", UtcDateTime, nullable=True),
        sa.Column("summed_at", UtcDateTime, nullable=True),
        sa.Column("refused_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_usage_batches"),
    )
    op.create_index("ix_usage_batches_rated_at_id", "usage_batches", ["rated_at", "id"])
    op.create_index("ix_usage_batches_summed_at_id", "usage_batches", ["summed_at", "id"])
    op.create_table(
        "usage_daily",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("bill_period_id", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "at",
            "project_id",
            "key_id",
            "model",
            "adapter",
            "kind",
            "price_version",
            "usage_period_id",
            "bill_period_id",
            name="pk_usage_daily",
        ),
    )
    op.create_index("ix_usage_daily_at", "usage_daily", ["at"])
    op.create_index("ix_usage_daily_bill_period", "usage_daily", ["bill_period_id"])
    op.create_table(
        "usage_end_user_daily",
        sa.Column("end_user", sa.String(256), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "tenant_id", "at", "project_id", "end_user", name="pk_usage_end_user_daily"
        ),
    )
    op.create_index(
        "ix_usage_end_user_daily_shown",
        "usage_end_user_daily",
        ["tenant_id", "at", "end_user"],
        postgresql_include=(
            "project_id",
            "requests",
            "input_tokens",
            "cached_tokens",
            "output_tokens",
            "waived_tokens",
        ),
    )
    op.create_table(
        "usage_engine_daily",
        sa.Column("engine_id", sa.String(80), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "tenant_id", "at", "project_id", "engine_id", name="pk_usage_engine_daily"
        ),
    )
    op.create_table(
        "usage_events",
        sa.Column("request_id", OrderedId, nullable=False),
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("route", sa.String(80), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=True),
        sa.Column("adapter_digest", sa.String(64), nullable=True),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("occurred_at", UtcDateTime, nullable=False),
        sa.Column("finished_at", UtcDateTime, nullable=False),
        sa.Column("input_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("waived_tokens", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String(40), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("settled_by", sa.String(20), nullable=False),
        sa.Column("quantity", sa.BigInteger, nullable=False),
        sa.Column("streamed", sa.Boolean, nullable=False),
        sa.Column("first_token_ms", sa.Integer, nullable=True),
        sa.Column("duration_ms", sa.Integer, nullable=False),
        sa.Column("queue_ms", sa.Integer, nullable=False),
        sa.Column("engine_id", sa.String(80), nullable=False),
        sa.Column("member_id", sa.String(40), nullable=True),
        sa.Column("end_user", sa.String(256), nullable=True),
        sa.Column("client_request_id", sa.String(200), nullable=True),
        sa.Column("moderation", sa.String(20), nullable=True),
        sa.Column("prompt_order", sa.String(40), nullable=True),
        sa.Column("reordered_cached_tokens", sa.Integer, nullable=False),
        sa.Column("truncated", sa.String(40), nullable=True),
        sa.Column("batch_job", sa.String(40), nullable=True),
        sa.Column("routed", sa.String(120), nullable=True),
        sa.Column("paid_by", sa.String(10), nullable=True),
        sa.Column("counted_by", sa.String(10), nullable=True),
        sa.Column("busy_us", sa.BigInteger, server_default="0", nullable=False),
        sa.Column("units", sa.BigInteger, server_default="0", nullable=False),
        sa.CheckConstraint(
            "cached_tokens <= input_tokens", name=op.f("ck_usage_events_cached_within_input")
        ),
        sa.CheckConstraint(
            "cached_tokens >= 0 and output_tokens >= 0 and waived_tokens >= 0 and quantity >= 0",
            name=op.f("ck_usage_events_counts_not_negative"),
        ),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage_events"),
        postgresql_partition_by="RANGE (request_id)",
    )
    op.create_index("ix_usage_events_batch", "usage_events", ["batch_id"])
    op.create_index("ix_usage_events_tenant_occurred", "usage_events", ["tenant_id", "occurred_at"])
    op.create_index(
        "ix_usage_events_wrong",
        "usage_events",
        ["tenant_id", "occurred_at"],
        postgresql_where=sa.text("status >= 400"),
        sqlite_where=sa.text("status >= 400"),
    )
    op.create_table(
        "usage_hourly",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("bill_period_id", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        *_quantities(),
        *_amounts(),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "at",
            "project_id",
            "key_id",
            "model",
            "adapter",
            "kind",
            "price_version",
            "usage_period_id",
            "bill_period_id",
            name="pk_usage_hourly",
        ),
    )
    op.create_table(
        "usage_retention",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("floor_id", OrderedId, nullable=False),
        sa.Column("kept_from", UtcDateTime, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
        sa.Column("dropped_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_usage_retention"),
    )
    op.create_table(
        "usage_tenant_daily",
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.PrimaryKeyConstraint(
            "at", "tenant_id", "model", "currency", name="pk_usage_tenant_daily"
        ),
    )
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("url", sa.String(1024), nullable=False),
        sa.Column("secret", sa.String(80), nullable=False),
        sa.Column("events", Json, nullable=False),
        sa.Column("format", sa.String(20), server_default="records", nullable=False),
        sa.Column("sample_percent", sa.Integer, server_default="100", nullable=False),
        sa.Column("authorization", sa.String(400), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_endpoints"),
    )
    op.create_index("ix_webhook_endpoints_tenant", "webhook_endpoints", ["tenant_id"])
    op.create_table(
        "credit_notes",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("invoice_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("seller_id", sa.String(40), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("label", sa.String(40), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("net_minor", sa.BigInteger, nullable=False),
        sa.Column("tax_minor", sa.BigInteger, nullable=False),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("reference", sa.String(160), nullable=False),
        sa.Column("transaction_id", sa.String(40), nullable=False),
        sa.Column("issued_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name="fk_credit_notes_invoice_id"),
        sa.PrimaryKeyConstraint("id", name="pk_credit_notes"),
        sa.UniqueConstraint("reference", name="uq_credit_notes_reference"),
        sa.UniqueConstraint("seller_id", "number", name="uq_credit_notes_seller_id_number"),
    )
    op.create_table(
        "credit_uses",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("grant_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("purpose", sa.String(20), nullable=False),
        sa.Column("units", Units, nullable=False),
        sa.Column("bill_period_id", sa.String(40), nullable=True),
        sa.Column("transaction_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(["grant_id"], ["credit_grants.id"], name="fk_credit_uses_grant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_credit_uses"),
    )
    op.create_index("ix_credit_uses_period", "credit_uses", ["bill_period_id"])
    op.create_table(
        "invoice_lines",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("invoice_id", sa.String(40), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("component", sa.String(20), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(120), nullable=False),
        sa.Column("adapter", sa.String(120), nullable=False),
        sa.Column("price_version", sa.String(40), nullable=False),
        sa.Column("usage_period_id", sa.String(40), nullable=False),
        sa.Column("quantity", sa.BigInteger, nullable=False),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.Column("exact", Units, nullable=False),
        sa.Column("amount_minor", sa.BigInteger, nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("details", Json, nullable=False),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name="fk_invoice_lines_invoice_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_invoice_lines"),
        sa.UniqueConstraint("invoice_id", "position", name="uq_invoice_lines_invoice_id_position"),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("transaction_id", sa.String(40), nullable=False),
        sa.Column("account_id", BigKey, nullable=False),
        sa.Column("units", Units, nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["ledger_accounts.id"], name="fk_ledger_entries_account_id"
        ),
        sa.ForeignKeyConstraint(
            ["transaction_id"], ["ledger_transactions.id"], name="fk_ledger_entries_transaction_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_entries"),
    )
    op.create_index("ix_ledger_entries_account", "ledger_entries", ["account_id", "id"])
    op.create_index("ix_ledger_entries_transaction", "ledger_entries", ["transaction_id"])
    op.bulk_insert(shards, [{"shard": number} for number in range(SHARDS)])
    if op.get_bind().dialect.name == "postgresql":
        _guard_postgresql()
    else:
        _guard_sqlite()


def downgrade() -> None:
    op.drop_table("ledger_entries")
    op.drop_table("invoice_lines")
    op.drop_table("credit_uses")
    op.drop_table("credit_notes")
    op.drop_table("webhook_endpoints")
    op.drop_table("usage_tenant_daily")
    op.drop_table("usage_retention")
    op.drop_table("usage_hourly")
    op.drop_table("usage_events")
    op.drop_table("usage_engine_daily")
    op.drop_table("usage_end_user_daily")
    op.drop_table("usage_daily")
    op.drop_table("usage_batches")
    op.drop_table("top_ups")
    op.drop_table("tier_positions")
    op.drop_table("tax_rates")
    op.drop_table("tax_quotes")
    op.drop_table("tax_exemptions")
    op.drop_table("subscriptions")
    op.drop_table("signed_months")
    op.drop_table("service_hourly")
    op.drop_table("service_daily")
    op.drop_table("sellers")
    op.drop_table("restore_marks")
    op.drop_table("reserved_numbers")
    op.drop_table("rerates")
    op.drop_table("reported_events")
    op.drop_table("refunds")
    op.drop_table("recoveries")
    op.drop_table("rating_workers")
    op.drop_table("rating_shards")
    op.drop_table("price_versions")
    op.drop_table("plans")
    op.drop_table("payments")
    op.drop_table("payment_outbox")
    op.drop_table("payment_methods")
    op.drop_table("payment_inbox")
    op.drop_table("payment_customers")
    op.drop_table("parked_events")
    op.drop_table("outbox")
    op.drop_table("organisation_links")
    op.drop_table("moved_days")
    op.drop_table("money_acts")
    op.drop_table("metered_spans")
    op.drop_table("ledger_transactions")
    op.drop_table("ledger_accounts")
    op.drop_table("invoices")
    op.drop_table("export_schedules")
    op.drop_table("export_jobs")
    op.drop_table("exchange_rates")
    op.drop_table("engine_time_daily")
    op.drop_table("engine_receipts")
    op.drop_table("engine_prices")
    op.drop_table("dunning_cases")
    op.drop_table("disputes")
    op.drop_table("credit_grants")
    op.drop_table("closed_units")
    op.drop_table("closed_days")
    op.drop_table("closed_charges")
    op.drop_table("child_invoices")
    op.drop_table("charges")
    op.drop_table("budgets")
    op.drop_table("billing_periods")
    op.drop_table("billing_accounts")
    op.drop_table("bank_lines")
    op.drop_table("audit_runs")
    op.drop_table("adjustments")
    op.drop_table("add_ons")
    op.drop_table("add_on_holdings")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("drop function tollhouse_append_only()")
        op.execute("drop function tollhouse_final_invoice()")
        op.execute("drop function tollhouse_final_line()")
        op.execute("drop function tollhouse_sum_to_zero()")


def _quantities() -> "tuple[sa.Column[int], ...]":
    """What a charge or a sum of charges counts."""
    return (
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("waived_tokens", sa.BigInteger, nullable=False),
        sa.Column("adapter_requests", sa.BigInteger, nullable=False),
        sa.Column("gpu_seconds", sa.BigInteger, nullable=False),
        sa.Column("moderation_calls", sa.BigInteger, nullable=False),
        sa.Column("audio_seconds", sa.BigInteger, server_default="0", nullable=False),
        sa.Column("images", sa.BigInteger, server_default="0", nullable=False),
        sa.Column("characters", sa.BigInteger, server_default="0", nullable=False),
    )


def _amounts() -> "tuple[sa.Column[int], ...]":
    """What each quantity costs, in picounits."""
    return (
        sa.Column("input_amount", Units, nullable=False),
        sa.Column("cached_amount", Units, nullable=False),
        sa.Column("output_amount", Units, nullable=False),
        sa.Column("waived_amount", Units, nullable=False),
        sa.Column("request_amount", Units, nullable=False),
        sa.Column("adapter_amount", Units, nullable=False),
        sa.Column("gpu_amount", Units, nullable=False),
        sa.Column("moderation_amount", Units, nullable=False),
        sa.Column("audio_amount", Units, server_default="0", nullable=False),
        sa.Column("image_amount", Units, server_default="0", nullable=False),
        sa.Column("character_amount", Units, server_default="0", nullable=False),
        sa.Column("amount", Units, nullable=False),
    )


def _guard_postgresql() -> None:
    """Partitions for ids of every time, and triggers that refuse changes of what is final.

    A transaction that sets `tollhouse.maintenance` to `on` may delete append-only rows."""
    for table in PARTITIONED:
        op.execute(f"create table {table}_default partition of {table} default")
    op.execute(
        """create function tollhouse_append_only() returns trigger language plpgsql as $$
        begin
            if current_setting('tollhouse.maintenance', true) = 'on' then
                if tg_op = 'DELETE' then return old; end if;
                return new;
            end if;
            raise exception '% is append-only: correct it with a new row', tg_table_name;
        end $$"""
    )
    for table in APPEND_ONLY:
        op.execute(
            f"create trigger append_only before update or delete on {table}"
            " for each row execute function tollhouse_append_only()"
        )
    for table in (*APPEND_ONLY, *(f"{each}_default" for each in PARTITIONED)):
        op.execute(
            f"create trigger append_only_truncate before truncate on {table}"
            " for each statement execute function tollhouse_append_only()"
        )
    changed = " or ".join(f"new.{name} is distinct from old.{name}" for name in FROZEN)
    op.execute(
        f"""create function tollhouse_final_invoice() returns trigger language plpgsql as $$
        begin
            if old.status = 'draft' then return coalesce(new, old); end if;
            if tg_op = 'DELETE' or new.status = 'draft' or {changed} then
                raise exception 'invoice % is final: a credit note corrects it', old.label;
            end if;
            return new;
        end $$"""
    )
    op.execute(
        """create function tollhouse_final_line() returns trigger language plpgsql as $$
        declare parent text; found_status text;
        begin
            if tg_op = 'INSERT' then parent := new.invoice_id; else parent := old.invoice_id; end if;
            select status into found_status from invoices where id = parent;
            if found_status <> 'draft' then
                raise exception 'the lines of final invoice % do not change', parent;
            end if;
            if tg_op = 'DELETE' then return old; end if;
            return new;
        end $$"""
    )
    op.execute(
        """create function tollhouse_sum_to_zero() returns trigger language plpgsql as $$
        declare off record;
        begin
            select currency, sum(units) as units into off from ledger_entries
            where transaction_id = new.transaction_id
            group by currency having sum(units) <> 0 limit 1;
            if found then
                raise exception 'ledger transaction % does not sum to zero: % in %',
                    new.transaction_id, off.units, off.currency using errcode = 'check_violation';
            end if;
            return null;
        end $$"""
    )
    op.execute(
        "create trigger final_invoice before update or delete on invoices"
        " for each row execute function tollhouse_final_invoice()"
    )
    op.execute(
        "create trigger final_line before insert or update or delete on invoice_lines"
        " for each row execute function tollhouse_final_line()"
    )
    op.execute(
        "create constraint trigger sum_to_zero after insert on ledger_entries"
        " deferrable initially deferred for each row execute function tollhouse_sum_to_zero()"
    )


def _guard_sqlite() -> None:
    """The same triggers, without the ledger's at commit: SQLite has none that are deferred."""
    for table in APPEND_ONLY:
        for action in ("update", "delete"):
            op.execute(
                f"create trigger append_only_{table}_{action} before {action} on {table}"
                f" begin select raise(abort, '{table} is append-only: correct it with a new row'); end"
            )
    changed = " or ".join(f"new.{name} is not old.{name}" for name in FROZEN)
    refusal = "begin select raise(abort, 'the invoice is final: a credit note corrects it'); end"
    op.execute(
        "create trigger final_invoice_update before update on invoices"
        f" when old.status <> 'draft' and (new.status = 'draft' or {changed}) {refusal}"
    )
    op.execute(
        "create trigger final_invoice_delete before delete on invoices"
        f" when old.status <> 'draft' {refusal}"
    )
    for action, row in (("insert", "new"), ("update", "old"), ("delete", "old")):
        op.execute(
            f"create trigger final_line_{action} before {action} on invoice_lines"
            f" when (select status from invoices where id = {row}.invoice_id) <> 'draft'"
            " begin select raise(abort, 'the lines of a final invoice do not change'); end"
        )
