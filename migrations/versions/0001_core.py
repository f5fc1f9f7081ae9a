"""The tables of core: tenants, projects, keys, members, sessions, adapters, the audit log."""

import sqlalchemy as sa
from alembic import op

from core.database import BigKey, Json, UtcDateTime
from core.tenants import triggers

revision = "0001_core"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=True),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("actor", sa.String(length=120), nullable=False),
        sa.Column("action", sa.String(length=80), nullable=False),
        sa.Column("target", sa.String(length=120), nullable=False),
        sa.Column("before", Json, nullable=True),
        sa.Column("after", Json, nullable=True),
        sa.Column("request_id", sa.String(length=40), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_tenant_at", "audit_log", ["tenant_id", "at"], unique=False)
    for statement in triggers.statements(op.get_bind().dialect.name):
        op.execute(sa.text(statement))
    op.create_table(
        "casbin_rule",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("ptype", sa.String(length=20), nullable=False),
        sa.Column("v0", sa.String(length=255), nullable=True),
        sa.Column("v1", sa.String(length=255), nullable=True),
        sa.Column("v2", sa.String(length=255), nullable=True),
        sa.Column("v3", sa.String(length=255), nullable=True),
        sa.Column("v4", sa.String(length=255), nullable=True),
        sa.Column("v5", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_casbin_rule")),
    )
    op.create_table(
        "dead_letters",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("task", sa.String(length=120), nullable=False),
        sa.Column("queue", sa.String(length=40), nullable=False),
        sa.Column("arguments", Json, nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("died_at", UtcDateTime, nullable=False),
        sa.Column("replayed_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letters")),
    )
    op.create_index(
        "ix_dead_letters_open", "dead_letters", ["replayed_at", "died_at"], unique=False
    )
    op.create_table(
        "epochs",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_epochs")),
    )
    op.create_table(
        "engine_drains",
        sa.Column("engine_id", sa.String(length=80), nullable=False),
        sa.Column("since", UtcDateTime, nullable=False),
        sa.Column("by", sa.String(length=120), nullable=False),
        sa.PrimaryKeyConstraint("engine_id", name=op.f("pk_engine_drains")),
    )
    op.create_table(
        "limit_plans",
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("body", Json, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_limit_plans")),
    )
    op.create_table(
        "limit_refusals",
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("reason", sa.String(length=120), nullable=False),
        sa.Column("refused", sa.BigInteger(), nullable=False),
        sa.Column("waited", sa.BigInteger(), nullable=False),
        sa.Column("waited_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "at", "reason", name=op.f("pk_limit_refusals")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("display_name", sa.String(length=200), nullable=False),
        sa.Column("plan", sa.String(length=120), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("currency", sa.String(length=3), nullable=False),
        sa.Column("timezone", sa.String(length=64), nullable=False),
        sa.Column("settings", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("base_model", sa.String(length=120), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(length=1024), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(length=40), nullable=False),
        sa.Column("removed_at", UtcDateTime, nullable=True),
        sa.CheckConstraint("rank > 0", name=op.f("ck_adapters_rank_positive")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_adapters_tenant_id_name")),
    )
    op.create_table(
        "limits",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("scope", sa.String(length=20), nullable=False),
        sa.Column("unit", sa.String(length=20), nullable=False),
        sa.Column("period_s", sa.Integer(), nullable=False),
        sa.Column("target", sa.String(length=120), nullable=False),
        sa.Column("limit_count", sa.BigInteger(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.Column("by_operator", sa.Boolean(), nullable=False),
        sa.CheckConstraint("limit_count > 0", name=op.f("ck_limits_limit_positive")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_limits_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_limits")),
        sa.UniqueConstraint(
            "tenant_id",
            "scope",
            "unit",
            "period_s",
            "target",
            name=op.f("uq_limits_tenant_id_scope_unit_period_s_target"),
        ),
    )
    op.create_table(
        "members",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("email", sa.String(length=320), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("password_hash", sa.String(length=200), nullable=True),
        sa.Column("oidc_subject", sa.String(length=255), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("disabled_at", UtcDateTime, nullable=True),
        sa.Column("last_seen_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_members_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_members")),
        sa.UniqueConstraint("tenant_id", "email", name=op.f("uq_members_tenant_id_email")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("archived_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_projects_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_projects_tenant_id_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("last_four", sa.String(length=4), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("allowed_ips", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(length=40), nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=True),
        sa.Column("revoked_at", UtcDateTime, nullable=True),
        sa.Column("last_used_at", UtcDateTime, nullable=True),
        sa.Column("rotated_to", sa.String(length=40), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_sha256", name=op.f("uq_api_keys_secret_sha256")),
    )
    op.create_index(
        "ix_api_keys_tenant_project", "api_keys", ["tenant_id", "project_id"], unique=False
    )
    op.create_table(
        "dashboard_sessions",
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("member_id", sa.String(length=40), nullable=True),
        sa.Column("key_id", sa.String(length=40), nullable=True),
        sa.Column("operator", sa.Boolean(), nullable=False),
        sa.Column("chosen_tenant", sa.String(length=40), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("revoked_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["chosen_tenant"], ["tenants.id"], name=op.f("fk_dashboard_sessions_chosen_tenant")
        ),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name=op.f("fk_dashboard_sessions_key_id")
        ),
        sa.ForeignKeyConstraint(
            ["member_id"], ["members.id"], name=op.f("fk_dashboard_sessions_member_id")
        ),
        sa.PrimaryKeyConstraint("secret_sha256", name=op.f("pk_dashboard_sessions")),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("purpose", sa.String(length=20), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant_id", "id"], unique=False)
    op.create_table(
        "file_pieces",
        sa.Column("file_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("fk_file_pieces_file_id")),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_file_pieces")),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("project_id", sa.String(length=40), nullable=False),
        sa.Column("key_id", sa.String(length=40), nullable=False),
        sa.Column("endpoint", sa.String(length=80), nullable=False),
        sa.Column("input_file_id", sa.String(length=40), nullable=False),
        sa.Column("completion_window", sa.String(length=10), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("labels", Json, nullable=False),
        sa.Column("errors", Json, nullable=False),
        sa.Column("model", sa.String(length=300), nullable=True),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("completed", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("input_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.Column("output_file_id", sa.String(length=40), nullable=True),
        sa.Column("error_file_id", sa.String(length=40), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("in_progress_at", UtcDateTime, nullable=True),
        sa.Column("finalizing_at", UtcDateTime, nullable=True),
        sa.Column("cancelling_at", UtcDateTime, nullable=True),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.Column("lease_owner", sa.String(length=80), nullable=True),
        sa.Column("lease_until", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_status", "batches", ["status"], unique=False)
    op.create_index("ix_batches_tenant_id", "batches", ["tenant_id", "id"], unique=False)
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(length=40), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.String(length=512), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_batch_lines_batch_id")),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_lines")),
    )
    op.create_index(
        "ix_batch_lines_state", "batch_lines", ["batch_id", "state", "number"], unique=False
    )
    op.create_table(
        "kept_answers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=40), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("claimed_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("headers", Json, nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kept_answers")),
    )
    op.create_index("ix_kept_answers_expires_at", "kept_answers", ["expires_at"], unique=False)
    op.create_index(
        "ix_kept_answers_tenant_id", "kept_answers", ["tenant_id", "claimed_at"], unique=False
    )


def downgrade() -> None:
    op.drop_table("kept_answers")
    op.drop_table("batch_lines")
    op.drop_table("batches")
    op.drop_table("file_pieces")
    op.drop_table("files")
    op.drop_table("dashboard_sessions")
    op.drop_table("api_keys")
    op.drop_table("projects")
    op.drop_table("members")
    op.drop_table("limits")
    op.drop_table("adapters")
    op.drop_table("tenants")
    op.drop_table("limit_refusals")
    op.drop_table("limit_plans")
    op.drop_table("engine_drains")
    op.drop_table("epochs")
    op.drop_table("dead_letters")
    op.drop_table("casbin_rule")
    op.drop_table("audit_log")
    for statement in triggers.drop_statements(op.get_bind().dialect.name):
        op.execute(sa.text(statement))
