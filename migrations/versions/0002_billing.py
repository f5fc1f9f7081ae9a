"""The tables of billing, their partitions, and the guards that refuse changes of what is final."""

import sqlalchemy as sa
from alembic import op

from billing import guards
from billing.columns import ORDERED_ID
from core.database import BigKey, Json, Units, UtcDateTime

revision = "0002_billing"
down_revision = "0001_core"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adjustments",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("rerate_id", sa.String(length=40), nullable=True),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("component", sa.String(length=20), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.Column("usage_period_id", sa.String(length=40), nullable=False),
        sa.Column("bill_period_id", sa.String(length=40), nullable=False),
        sa.Column("transaction_id", sa.String(length=40), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adjustments")),
    )
    op.create_index("ix_adjustments_bill_period", "adjustments", ["bill_period_id"], unique=False)
    op.create_table(
        "audit_runs",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("clean", sa.Boolean(), nullable=False),
        sa.Column("report", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_runs")),
    )
    op.create_index(op.f("ix_audit_runs_at"), "audit_runs", ["at"], unique=False)
    op.create_table(
        "billing_accounts",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("seller_id", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("timezone", sa.String(length=64), nullable=False),
        sa.Column("anchor_day", sa.Integer(), nullable=False),
        sa.Column("anchored_at", UtcDateTime, nullable=True),
        sa.Column("legal_name", sa.String(length=200), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("email", sa.String(length=320), nullable=False),
        sa.Column("tax_id", sa.String(length=80), nullable=False),
        sa.Column("tax_region", sa.String(length=20), nullable=False),
        sa.Column("tax_exempt", sa.Boolean(), nullable=False),
        sa.Column("collection", sa.String(length=20), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("prepaid_only", sa.Boolean(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.CheckConstraint(
            "anchor_day between 1 and 31", name=op.f("ck_billing_accounts_anchor_day")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_billing_accounts")),
    )
    op.create_table(
        "billing_periods",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("ends_at > starts_at", name=op.f("ck_billing_periods_ends_after_start")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_billing_periods")),
        sa.UniqueConstraint(
            "tenant_id", "starts_at", name=op.f("uq_billing_periods_tenant_id_starts_at")
        ),
    )
    op.create_index(
        "ix_billing_periods_open", "billing_periods", ["closed_at", "ends_at"], unique=False
    )
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("scope", sa.String(length=20), nullable=False),
        sa.Column("scope_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("cap", Units, nullable=False),
        sa.Column("window", sa.String(length=20), nullable=False),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("thresholds", Json, nullable=False),
        sa.Column("webhooks", Json, nullable=False),
        sa.Column("emails", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("cap > 0", name=op.f("ck_budgets_cap_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
    )
    op.create_index("ix_budgets_tenant", "budgets", ["tenant_id"], unique=False)
    op.create_table(
        "charges",
        sa.Column("request_id", ORDERED_ID, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("usage_period_id", sa.String(length=40), nullable=False),
        sa.Column("bill_period_id", sa.String(length=40), nullable=False),
        sa.Column("transaction_id", sa.String(length=40), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("waived_tokens", sa.BigInteger(), nullable=False),
        sa.Column("adapter_requests", sa.BigInteger(), nullable=False),
        sa.Column("gpu_seconds", sa.BigInteger(), nullable=False),
        sa.Column("moderation_calls", sa.BigInteger(), nullable=False),
        sa.Column("input_amount", Units, nullable=False),
        sa.Column("cached_amount", Units, nullable=False),
        sa.Column("output_amount", Units, nullable=False),
        sa.Column("waived_amount", Units, nullable=False),
        sa.Column("request_amount", Units, nullable=False),
        sa.Column("adapter_amount", Units, nullable=False),
        sa.Column("gpu_amount", Units, nullable=False),
        sa.Column("moderation_amount", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_charges")),
    )
    op.create_index("ix_charges_bill_period", "charges", ["bill_period_id"], unique=False)
    op.create_index("ix_charges_transaction", "charges", ["transaction_id"], unique=False)
    op.create_table(
        "credit_grants",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("granted", Units, nullable=False),
        sa.Column("remaining", Units, nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("granted_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=True),
        sa.Column("expired_at", UtcDateTime, nullable=True),
        sa.Column("reference", sa.String(length=160), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "remaining >= 0 and remaining <= granted",
            name=op.f("ck_credit_grants_remaining_in_range"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_grants")),
        sa.UniqueConstraint("reference", name=op.f("uq_credit_grants_reference")),
    )
    op.create_index("ix_credit_grants_tenant", "credit_grants", ["tenant_id", "kind"], unique=False)
    op.create_table(
        "disputes",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("payment_id", sa.String(length=40), nullable=True),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("external_id", sa.String(length=120), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=40), nullable=False),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("withdrawn", sa.Boolean(), nullable=False),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_disputes")),
        sa.UniqueConstraint(
            "provider", "external_id", name=op.f("uq_disputes_provider_external_id")
        ),
    )
    op.create_table(
        "dunning_cases",
        sa.Column("invoice_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("opened_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=True),
        sa.Column("suspended_at", UtcDateTime, nullable=True),
        sa.Column("closed_at", UtcDateTime, nullable=True),
        sa.Column("outcome", sa.String(length=40), nullable=True),
        sa.PrimaryKeyConstraint("invoice_id", name=op.f("pk_dunning_cases")),
    )
    op.create_index(
        "ix_dunning_cases_next", "dunning_cases", ["closed_at", "next_at"], unique=False
    )
    op.create_table(
        "engine_receipts",
        sa.Column("request_id", ORDERED_ID, nullable=False),
        sa.Column("engine_id", sa.String(length=80), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("generated_tokens", sa.Integer(), nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_engine_receipts")),
    )
    op.create_table(
        "export_jobs",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("what", sa.String(length=20), nullable=False),
        sa.Column("format", sa.String(length=20), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("destination", sa.String(length=1024), nullable=False),
        sa.Column("schedule_id", sa.String(length=40), nullable=True),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=True),
        sa.Column("sha256", sa.String(length=64), nullable=True),
        sa.Column("address", sa.String(length=1200), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_export_jobs")),
    )
    op.create_index("ix_export_jobs_due", "export_jobs", ["status", "next_at"], unique=False)
    op.create_index(
        "ix_export_jobs_tenant", "export_jobs", ["tenant_id", "created_at"], unique=False
    )
    op.create_table(
        "export_schedules",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("what", sa.String(length=20), nullable=False),
        sa.Column("format", sa.String(length=20), nullable=False),
        sa.Column("destination", sa.String(length=1024), nullable=False),
        sa.Column("options", Json, nullable=False),
        sa.Column("every", sa.String(length=20), nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("paused_at", UtcDateTime, nullable=True),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_export_schedules")),
    )
    op.create_table(
        "invoices",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("seller_id", sa.String(length=40), nullable=False),
        sa.Column("period_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.Column("label", sa.String(length=40), nullable=True),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("period_start", UtcDateTime, nullable=False),
        sa.Column("period_end", UtcDateTime, nullable=False),
        sa.Column("timezone", sa.String(length=64), nullable=False),
        sa.Column("billed_to", Json, nullable=False),
        sa.Column("subtotal_minor", sa.BigInteger(), nullable=False),
        sa.Column("promo_minor", sa.BigInteger(), nullable=False),
        sa.Column("tax_minor", sa.BigInteger(), nullable=False),
        sa.Column("total_minor", sa.BigInteger(), nullable=False),
        sa.Column("prepaid_minor", sa.BigInteger(), nullable=False),
        sa.Column("due_minor", sa.BigInteger(), nullable=False),
        sa.Column("paid_minor", sa.BigInteger(), nullable=False),
        sa.Column("credited_minor", sa.BigInteger(), nullable=False),
        sa.Column("exact", Units, nullable=False),
        sa.Column("drafted_at", UtcDateTime, nullable=False),
        sa.Column("final_at", UtcDateTime, nullable=True),
        sa.Column("due_at", UtcDateTime, nullable=True),
        sa.Column("settled_at", UtcDateTime, nullable=True),
        sa.Column("external_id", sa.String(length=120), nullable=True),
        sa.Column("pay_page", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint("period_id", name=op.f("uq_invoices_period_id")),
        sa.UniqueConstraint("seller_id", "number", name=op.f("uq_invoices_seller_id_number")),
    )
    op.create_index("ix_invoices_status", "invoices", ["status", "due_at"], unique=False)
    op.create_index("ix_invoices_tenant", "invoices", ["tenant_id", "period_start"], unique=False)
    op.create_table(
        "ledger_accounts",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("balance", Units, nullable=False),
        sa.CheckConstraint(
            "kind not in ('prepaid', 'promo') or balance <= 0",
            name=op.f("ck_ledger_accounts_wallet"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_accounts")),
        sa.UniqueConstraint(
            "tenant_id", "kind", "currency", name=op.f("uq_ledger_accounts_tenant_id_kind_currency")
        ),
    )
    op.create_table(
        "ledger_transactions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("reference", sa.String(length=160), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("reverses_id", sa.String(length=40), nullable=True),
        sa.Column("memo", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_transactions")),
        sa.UniqueConstraint("reference", name=op.f("uq_ledger_transactions_reference")),
    )
    op.create_index(
        "ix_ledger_transactions_tenant_at", "ledger_transactions", ["tenant_id", "at"], unique=False
    )
    op.create_table(
        "outbox",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("endpoint_id", sa.String(length=40), nullable=True),
        sa.Column("channel", sa.String(length=20), nullable=False),
        sa.Column("target", sa.String(length=1024), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("dedupe", sa.String(length=200), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sa.UniqueConstraint("dedupe", name=op.f("uq_outbox_dedupe")),
    )
    op.create_index("ix_outbox_due", "outbox", ["done_at", "next_at"], unique=False)
    op.create_index("ix_outbox_tenant", "outbox", ["tenant_id", "id"], unique=False)
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("url", sa.String(length=1024), nullable=False),
        sa.Column("secret", sa.String(length=80), nullable=False),
        sa.Column("events", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index("ix_webhook_endpoints_tenant", "webhook_endpoints", ["tenant_id"], unique=False)
    op.create_table(
        "parked_events",
        sa.Column("request_id", ORDERED_ID, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("code", sa.String(length=40), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("parked_at", UtcDateTime, nullable=False),
        sa.Column("released_at", UtcDateTime, nullable=True),
        sa.Column("dismissed_by", sa.String(length=120), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_parked_events")),
    )
    op.create_table(
        "payment_customers",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("external_id", sa.String(length=120), nullable=False),
        sa.Column("default_method", sa.String(length=120), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "provider", name=op.f("pk_payment_customers")),
        sa.UniqueConstraint(
            "provider", "external_id", name=op.f("uq_payment_customers_provider_external_id")
        ),
    )
    op.create_table(
        "payment_inbox",
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("external_id", sa.String(length=120), nullable=False),
        sa.Column("type", sa.String(length=80), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("subject_id", sa.String(length=120), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("occurred_at", UtcDateTime, nullable=False),
        sa.Column("received_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("parked", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("provider", "external_id", name=op.f("pk_payment_inbox")),
    )
    op.create_index("ix_payment_inbox_open", "payment_inbox", ["done_at", "next_at"], unique=False)
    op.create_index(
        "ix_payment_inbox_subject",
        "payment_inbox",
        ["provider", "kind", "subject_id"],
        unique=False,
    )
    op.create_table(
        "payment_methods",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("external_id", sa.String(length=120), nullable=False),
        sa.Column("label", sa.String(length=120), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("detached_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payment_methods")),
        sa.UniqueConstraint(
            "provider", "external_id", name=op.f("uq_payment_methods_provider_external_id")
        ),
    )
    op.create_table(
        "payment_outbox",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("subject_id", sa.String(length=120), nullable=False),
        sa.Column("payload", Json, nullable=False),
        sa.Column("progress", Json, nullable=False),
        sa.Column("idempotency_key", sa.String(length=160), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("next_at", UtcDateTime, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("done_at", UtcDateTime, nullable=True),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payment_outbox")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_payment_outbox_idempotency_key")),
    )
    op.create_index("ix_payment_outbox_due", "payment_outbox", ["done_at", "next_at"], unique=False)
    op.create_table(
        "payments",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("invoice_id", sa.String(length=40), nullable=True),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("external_id", sa.String(length=120), nullable=True),
        sa.Column("reference", sa.String(length=160), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("refunded_minor", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("settled_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("amount_minor > 0", name=op.f("ck_payments_amount_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payments")),
        sa.UniqueConstraint(
            "provider", "external_id", name=op.f("uq_payments_provider_external_id")
        ),
        sa.UniqueConstraint("reference", name=op.f("uq_payments_reference")),
    )
    op.create_index("ix_payments_invoice", "payments", ["invoice_id"], unique=False)
    op.create_index("ix_payments_tenant", "payments", ["tenant_id", "created_at"], unique=False)
    op.create_table(
        "plans",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("base_fee", Units, nullable=False),
        sa.Column("seat_fee", Units, nullable=False),
        sa.Column("included_seats", sa.Integer(), nullable=False),
        sa.Column("included_usage", Units, nullable=False),
        sa.Column("minimum_commitment", Units, nullable=False),
        sa.Column("grace_hours", sa.Integer(), nullable=False),
        sa.Column("payment_terms_days", sa.Integer(), nullable=False),
        sa.Column("suspend_after_days", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
        sa.UniqueConstraint("name", name=op.f("uq_plans_name")),
    )
    op.create_table(
        "price_versions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("effective_from", UtcDateTime, nullable=False),
        sa.Column("effective_to", UtcDateTime, nullable=True),
        sa.Column("terms", Json, nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(length=120), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_versions")),
    )
    op.create_index(
        "ix_price_versions_scope",
        "price_versions",
        ["model", "tenant_id", "adapter", "effective_from"],
        unique=False,
    )
    op.create_table(
        "refunds",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("payment_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("provider", sa.String(length=20), nullable=False),
        sa.Column("external_id", sa.String(length=120), nullable=True),
        sa.Column("reference", sa.String(length=160), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_refunds")),
        sa.UniqueConstraint(
            "provider", "external_id", name=op.f("uq_refunds_provider_external_id")
        ),
        sa.UniqueConstraint("reference", name=op.f("uq_refunds_reference")),
    )
    op.create_index(op.f("ix_refunds_payment_id"), "refunds", ["payment_id"], unique=False)
    op.create_table(
        "rerates",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("from_version", sa.String(length=40), nullable=False),
        sa.Column("to_version", sa.String(length=40), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("posted_at", UtcDateTime, nullable=False),
        sa.Column("posted_by", sa.String(length=120), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rerates")),
    )
    op.create_table(
        "sellers",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("tax_id", sa.String(length=80), nullable=False),
        sa.Column("number_prefix", sa.String(length=20), nullable=False),
        sa.Column("next_number", sa.BigInteger(), nullable=False),
        sa.Column("next_credit_note", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sellers")),
    )
    op.create_table(
        "subscriptions",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("plan_id", sa.String(length=40), nullable=False),
        sa.Column("seats", sa.Integer(), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("seats >= 0", name=op.f("ck_subscriptions_seats_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_subscriptions")),
        sa.UniqueConstraint(
            "tenant_id", "starts_at", name=op.f("uq_subscriptions_tenant_id_starts_at")
        ),
    )
    op.create_table(
        "tax_rates",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("region", sa.String(length=20), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("rate_ppm", sa.Integer(), nullable=False),
        sa.Column("effective_from", UtcDateTime, nullable=False),
        sa.Column("effective_to", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tax_rates")),
    )
    op.create_index("ix_tax_rates_region", "tax_rates", ["region", "effective_from"], unique=False)
    op.create_table(
        "tier_positions",
        sa.Column("usage_period_id", sa.String(length=40), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("component", sa.String(length=20), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "usage_period_id", "price_version", "component", name=op.f("pk_tier_positions")
        ),
    )
    op.create_table(
        "top_ups",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("threshold", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("pending_reference", sa.String(length=160), nullable=True),
        sa.Column("last_at", UtcDateTime, nullable=True),
        sa.Column("last_error", sa.String(length=120), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_top_ups")),
    )
    op.create_table(
        "service_daily",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("member_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("answers", sa.BigInteger(), nullable=False),
        sa.Column("refused", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.BigInteger(), nullable=False),
        sa.Column("reordered_cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("first_0", sa.BigInteger(), nullable=False),
        sa.Column("first_1", sa.BigInteger(), nullable=False),
        sa.Column("first_2", sa.BigInteger(), nullable=False),
        sa.Column("first_3", sa.BigInteger(), nullable=False),
        sa.Column("first_4", sa.BigInteger(), nullable=False),
        sa.Column("first_5", sa.BigInteger(), nullable=False),
        sa.Column("first_6", sa.BigInteger(), nullable=False),
        sa.Column("first_7", sa.BigInteger(), nullable=False),
        sa.Column("first_8", sa.BigInteger(), nullable=False),
        sa.Column("first_9", sa.BigInteger(), nullable=False),
        sa.Column("first_10", sa.BigInteger(), nullable=False),
        sa.Column("first_11", sa.BigInteger(), nullable=False),
        sa.Column("speed_0", sa.BigInteger(), nullable=False),
        sa.Column("speed_1", sa.BigInteger(), nullable=False),
        sa.Column("speed_2", sa.BigInteger(), nullable=False),
        sa.Column("speed_3", sa.BigInteger(), nullable=False),
        sa.Column("speed_4", sa.BigInteger(), nullable=False),
        sa.Column("speed_5", sa.BigInteger(), nullable=False),
        sa.Column("speed_6", sa.BigInteger(), nullable=False),
        sa.Column("speed_7", sa.BigInteger(), nullable=False),
        sa.Column("speed_8", sa.BigInteger(), nullable=False),
        sa.Column("speed_9", sa.BigInteger(), nullable=False),
        sa.Column("speed_10", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("waived_tokens", sa.BigInteger(), nullable=False),
        sa.Column("adapter_requests", sa.BigInteger(), nullable=False),
        sa.Column("gpu_seconds", sa.BigInteger(), nullable=False),
        sa.Column("moderation_calls", sa.BigInteger(), nullable=False),
        sa.Column("input_amount", Units, nullable=False),
        sa.Column("cached_amount", Units, nullable=False),
        sa.Column("output_amount", Units, nullable=False),
        sa.Column("waived_amount", Units, nullable=False),
        sa.Column("request_amount", Units, nullable=False),
        sa.Column("adapter_amount", Units, nullable=False),
        sa.Column("gpu_amount", Units, nullable=False),
        sa.Column("moderation_amount", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
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
            name=op.f("pk_service_daily"),
        ),
    )
    op.create_table(
        "service_hourly",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("member_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("answers", sa.BigInteger(), nullable=False),
        sa.Column("refused", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.BigInteger(), nullable=False),
        sa.Column("reordered_cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("first_0", sa.BigInteger(), nullable=False),
        sa.Column("first_1", sa.BigInteger(), nullable=False),
        sa.Column("first_2", sa.BigInteger(), nullable=False),
        sa.Column("first_3", sa.BigInteger(), nullable=False),
        sa.Column("first_4", sa.BigInteger(), nullable=False),
        sa.Column("first_5", sa.BigInteger(), nullable=False),
        sa.Column("first_6", sa.BigInteger(), nullable=False),
        sa.Column("first_7", sa.BigInteger(), nullable=False),
        sa.Column("first_8", sa.BigInteger(), nullable=False),
        sa.Column("first_9", sa.BigInteger(), nullable=False),
        sa.Column("first_10", sa.BigInteger(), nullable=False),
        sa.Column("first_11", sa.BigInteger(), nullable=False),
        sa.Column("speed_0", sa.BigInteger(), nullable=False),
        sa.Column("speed_1", sa.BigInteger(), nullable=False),
        sa.Column("speed_2", sa.BigInteger(), nullable=False),
        sa.Column("speed_3", sa.BigInteger(), nullable=False),
        sa.Column("speed_4", sa.BigInteger(), nullable=False),
        sa.Column("speed_5", sa.BigInteger(), nullable=False),
        sa.Column("speed_6", sa.BigInteger(), nullable=False),
        sa.Column("speed_7", sa.BigInteger(), nullable=False),
        sa.Column("speed_8", sa.BigInteger(), nullable=False),
        sa.Column("speed_9", sa.BigInteger(), nullable=False),
        sa.Column("speed_10", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("waived_tokens", sa.BigInteger(), nullable=False),
        sa.Column("adapter_requests", sa.BigInteger(), nullable=False),
        sa.Column("gpu_seconds", sa.BigInteger(), nullable=False),
        sa.Column("moderation_calls", sa.BigInteger(), nullable=False),
        sa.Column("input_amount", Units, nullable=False),
        sa.Column("cached_amount", Units, nullable=False),
        sa.Column("output_amount", Units, nullable=False),
        sa.Column("waived_amount", Units, nullable=False),
        sa.Column("request_amount", Units, nullable=False),
        sa.Column("adapter_amount", Units, nullable=False),
        sa.Column("gpu_amount", Units, nullable=False),
        sa.Column("moderation_amount", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
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
            name=op.f("pk_service_hourly"),
        ),
    )
    op.create_table(
        "usage_batches",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("recorded_at", UtcDateTime, nullable=False),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("rated_at", UtcDateTime, nullable=True),
        sa.Column("summed_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_batches")),
    )
    op.create_index(
        "ix_usage_batches_summed_at_id", "usage_batches", ["summed_at", "id"], unique=False
    )
    op.create_index(
        "ix_usage_batches_rated_at_id", "usage_batches", ["rated_at", "id"], unique=False
    )
    op.create_table(
        "usage_daily",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("usage_period_id", sa.String(length=40), nullable=False),
        sa.Column("bill_period_id", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("waived_tokens", sa.BigInteger(), nullable=False),
        sa.Column("adapter_requests", sa.BigInteger(), nullable=False),
        sa.Column("gpu_seconds", sa.BigInteger(), nullable=False),
        sa.Column("moderation_calls", sa.BigInteger(), nullable=False),
        sa.Column("input_amount", Units, nullable=False),
        sa.Column("cached_amount", Units, nullable=False),
        sa.Column("output_amount", Units, nullable=False),
        sa.Column("waived_amount", Units, nullable=False),
        sa.Column("request_amount", Units, nullable=False),
        sa.Column("adapter_amount", Units, nullable=False),
        sa.Column("gpu_amount", Units, nullable=False),
        sa.Column("moderation_amount", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
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
            name=op.f("pk_usage_daily"),
        ),
    )
    op.create_index("ix_usage_daily_bill_period", "usage_daily", ["bill_period_id"], unique=False)
    op.create_index("ix_usage_daily_at", "usage_daily", ["at"], unique=False)
    op.create_table(
        "usage_house_daily",
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("amount", Units, nullable=False),
        sa.PrimaryKeyConstraint(
            "at", "tenant_id", "model", "currency", name=op.f("pk_usage_house_daily")
        ),
    )
    op.create_table(
        "usage_events",
        sa.Column("request_id", ORDERED_ID, nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("route", sa.String(length=80), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=True),
        sa.Column("adapter_digest", sa.String(length=64), nullable=True),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("occurred_at", UtcDateTime, nullable=False),
        sa.Column("finished_at", UtcDateTime, nullable=False),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("waived_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=40), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("settled_by", sa.String(length=20), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.Column("streamed", sa.Boolean(), nullable=False),
        sa.Column("first_token_ms", sa.Integer(), nullable=True),
        sa.Column("duration_ms", sa.Integer(), nullable=False),
        sa.Column("queue_ms", sa.Integer(), nullable=False),
        sa.Column("engine_id", sa.String(length=80), nullable=False),
        sa.Column("member_id", sa.String(length=40), nullable=True),
        sa.Column("end_user", sa.String(length=200), nullable=True),
        sa.Column("client_request_id", sa.String(length=200), nullable=True),
        sa.Column("moderation", sa.String(length=20), nullable=True),
        sa.Column("prompt_order", sa.String(length=40), nullable=True),
        sa.Column("reordered_cached_tokens", sa.Integer(), nullable=False),
        sa.Column("truncated", sa.String(length=40), nullable=True),
        sa.Column("batch_job", sa.String(length=40), nullable=True),
        sa.Column("routed", sa.String(length=120), nullable=True),
        sa.Column("paid_by", sa.String(length=10), nullable=True),
        sa.CheckConstraint(
            "cached_tokens <= input_tokens", name=op.f("ck_usage_events_cached_within_input")
        ),
        sa.CheckConstraint(
            "cached_tokens >= 0 and output_tokens >= 0 and waived_tokens >= 0 and quantity >= 0",
            name=op.f("ck_usage_events_counts_not_negative"),
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_usage_events")),
        postgresql_partition_by="RANGE (request_id)",
    )
    op.create_index("ix_usage_events_batch", "usage_events", ["batch_id"], unique=False)
    op.create_index(
        "ix_usage_events_tenant_occurred",
        "usage_events",
        ["tenant_id", "occurred_at"],
        unique=False,
    )
    wrong = sa.text("status >= 400")
    op.create_index(
        "ix_usage_events_wrong",
        "usage_events",
        ["tenant_id", "occurred_at"],
        unique=False,
        postgresql_where=wrong,
        sqlite_where=wrong,
    )
    op.create_table(
        "usage_hourly",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("usage_period_id", sa.String(length=40), nullable=False),
        sa.Column("bill_period_id", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("waived_tokens", sa.BigInteger(), nullable=False),
        sa.Column("adapter_requests", sa.BigInteger(), nullable=False),
        sa.Column("gpu_seconds", sa.BigInteger(), nullable=False),
        sa.Column("moderation_calls", sa.BigInteger(), nullable=False),
        sa.Column("input_amount", Units, nullable=False),
        sa.Column("cached_amount", Units, nullable=False),
        sa.Column("output_amount", Units, nullable=False),
        sa.Column("waived_amount", Units, nullable=False),
        sa.Column("request_amount", Units, nullable=False),
        sa.Column("adapter_amount", Units, nullable=False),
        sa.Column("gpu_amount", Units, nullable=False),
        sa.Column("moderation_amount", Units, nullable=False),
        sa.Column("amount", Units, nullable=False),
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
            name=op.f("pk_usage_hourly"),
        ),
    )
    op.create_table(
        "usage_retention",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("floor_id", ORDERED_ID, nullable=False),
        sa.Column("kept_from", UtcDateTime, nullable=False),
        sa.Column("events", sa.BigInteger(), nullable=False),
        sa.Column("dropped_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_retention")),
    )
    op.create_table(
        "credit_notes",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("invoice_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("seller_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("label", sa.String(length=40), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("net_minor", sa.BigInteger(), nullable=False),
        sa.Column("tax_minor", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reference", sa.String(length=160), nullable=False),
        sa.Column("transaction_id", sa.String(length=40), nullable=False),
        sa.Column("issued_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name=op.f("fk_credit_notes_invoice_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_notes")),
        sa.UniqueConstraint("reference", name=op.f("uq_credit_notes_reference")),
        sa.UniqueConstraint("seller_id", "number", name=op.f("uq_credit_notes_seller_id_number")),
    )
    op.create_table(
        "credit_uses",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("grant_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("purpose", sa.String(length=20), nullable=False),
        sa.Column("units", Units, nullable=False),
        sa.Column("bill_period_id", sa.String(length=40), nullable=True),
        sa.Column("transaction_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(
            ["grant_id"], ["credit_grants.id"], name=op.f("fk_credit_uses_grant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_uses")),
    )
    op.create_index("ix_credit_uses_period", "credit_uses", ["bill_period_id"], unique=False)
    op.create_table(
        "invoice_lines",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("invoice_id", sa.String(length=40), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("component", sa.String(length=20), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("model", sa.String(length=120), nullable=False),
        sa.Column("adapter", sa.String(length=120), nullable=False),
        sa.Column("price_version", sa.String(length=40), nullable=False),
        sa.Column("usage_period_id", sa.String(length=40), nullable=False),
        sa.Column("quantity", sa.BigInteger(), nullable=False),
        sa.Column("unit", sa.String(length=20), nullable=False),
        sa.Column("exact", Units, nullable=False),
        sa.Column("amount_minor", sa.BigInteger(), nullable=False),
        sa.Column("starts_at", UtcDateTime, nullable=False),
        sa.Column("ends_at", UtcDateTime, nullable=False),
        sa.Column("details", Json, nullable=False),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_lines_invoice_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoice_lines")),
        sa.UniqueConstraint(
            "invoice_id", "position", name=op.f("uq_invoice_lines_invoice_id_position")
        ),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("transaction_id", sa.String(length=40), nullable=False),
        sa.Column("account_id", BigKey, nullable=False),
        sa.Column("units", Units, nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.ForeignKeyConstraint(
            ["account_id"], ["ledger_accounts.id"], name=op.f("fk_ledger_entries_account_id")
        ),
        sa.ForeignKeyConstraint(
            ["transaction_id"],
            ["ledger_transactions.id"],
            name=op.f("fk_ledger_entries_transaction_id"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_entries")),
    )
    op.create_index(
        "ix_ledger_entries_account", "ledger_entries", ["account_id", "id"], unique=False
    )
    op.create_index(
        "ix_ledger_entries_transaction", "ledger_entries", ["transaction_id"], unique=False
    )

    for statement in guards.statements(op.get_bind().dialect.name):
        op.execute(sa.text(statement))


def downgrade() -> None:
    op.drop_table("ledger_entries")
    op.drop_table("invoice_lines")
    op.drop_table("credit_uses")
    op.drop_table("credit_notes")
    op.drop_table("usage_retention")
    op.drop_table("usage_hourly")
    op.drop_table("usage_events")
    op.drop_table("usage_house_daily")
    op.drop_table("usage_daily")
    op.drop_table("usage_batches")
    op.drop_table("service_hourly")
    op.drop_table("service_daily")
    op.drop_table("top_ups")
    op.drop_table("tier_positions")
    op.drop_table("tax_rates")
    op.drop_table("subscriptions")
    op.drop_table("sellers")
    op.drop_table("rerates")
    op.drop_table("refunds")
    op.drop_table("price_versions")
    op.drop_table("plans")
    op.drop_table("payments")
    op.drop_table("payment_outbox")
    op.drop_table("payment_methods")
    op.drop_table("payment_inbox")
    op.drop_table("payment_customers")
    op.drop_table("parked_events")
    op.drop_table("webhook_endpoints")
    op.drop_table("outbox")
    op.drop_table("ledger_transactions")
    op.drop_table("ledger_accounts")
    op.drop_table("invoices")
    op.drop_table("export_schedules")
    op.drop_table("export_jobs")
    op.drop_table("engine_receipts")
    op.drop_table("dunning_cases")
    op.drop_table("disputes")
    op.drop_table("credit_grants")
    op.drop_table("charges")
    op.drop_table("budgets")
    op.drop_table("billing_periods")
    op.drop_table("billing_accounts")
    op.drop_table("audit_runs")
    op.drop_table("adjustments")
    for statement in guards.drop_statements(op.get_bind().dialect.name):
        op.execute(sa.text(statement))
