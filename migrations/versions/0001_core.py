"""The tables of core: tenants, projects, keys, members, sessions, batches, responses, the audit log."""

import sqlalchemy as sa
from alembic import op

from migrations.column_types import BigKey, Json, UtcDateTime

revision = "0001_core"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("actor", sa.String(120), nullable=False),
        sa.Column("action", sa.String(80), nullable=False),
        sa.Column("target", sa.String(120), nullable=False),
        sa.Column("before", Json, nullable=True),
        sa.Column("after", Json, nullable=True),
        sa.Column("request_id", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_index("ix_audit_log_tenant_at", "audit_log", ["tenant_id", "at"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("endpoint", sa.String(80), nullable=False),
        sa.Column("input_file_id", sa.String(40), nullable=False),
        sa.Column("completion_window", sa.String(10), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("labels", Json, nullable=False),
        sa.Column("errors", Json, nullable=False),
        sa.Column("model", sa.String(300), nullable=True),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("input_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("output_file_id", sa.String(40), nullable=True),
        sa.Column("error_file_id", sa.String(40), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("in_progress_at", UtcDateTime, nullable=True),
        sa.Column("finalizing_at", UtcDateTime, nullable=True),
        sa.Column("cancelling_at", UtcDateTime, nullable=True),
        sa.Column("ended_at", UtcDateTime, nullable=True),
        sa.Column("lease_owner", sa.String(80), nullable=True),
        sa.Column("lease_until", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_index("ix_batches_tenant_id", "batches", ["tenant_id", "id"])
    op.create_table(
        "casbin_rule",
        sa.Column("id", sa.Integer, autoincrement=True, nullable=False),
        sa.Column("ptype", sa.String(20), nullable=False),
        sa.Column("v0", sa.String(255), nullable=True),
        sa.Column("v1", sa.String(255), nullable=True),
        sa.Column("v2", sa.String(255), nullable=True),
        sa.Column("v3", sa.String(255), nullable=True),
        sa.Column("v4", sa.String(255), nullable=True),
        sa.Column("v5", sa.String(255), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_casbin_rule"),
    )
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(80), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_conversations"),
    )
    op.create_index("ix_conversations_expires_at", "conversations", ["expires_at"])
    op.create_index("ix_conversations_stored_bytes", "conversations", ["tenant_id", "stored_bytes"])
    op.create_index("ix_conversations_tenant_id", "conversations", ["tenant_id", "id"])
    op.create_table(
        "dead_letters",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("task", sa.String(120), nullable=False),
        sa.Column("queue", sa.String(40), nullable=False),
        sa.Column("arguments", Json, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("died_at", UtcDateTime, nullable=False),
        sa.Column("replayed_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_dead_letters"),
    )
    op.create_index("ix_dead_letters_open", "dead_letters", ["replayed_at", "died_at"])
    op.create_table(
        "engine_drains",
        sa.Column("engine_id", sa.String(80), nullable=False),
        sa.Column("since", UtcDateTime, nullable=False),
        sa.Column("by", sa.String(120), nullable=False),
        sa.PrimaryKeyConstraint("engine_id", name="pk_engine_drains"),
    )
    op.create_table(
        "epochs",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_epochs"),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("purpose", sa.String(20), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant_id", "id"])
    op.create_table(
        "idempotency_records",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("claimed_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("status", sa.Integer, nullable=True),
        sa.Column("headers", Json, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=True),
        sa.Column("stored_bytes", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_idempotency_records"),
    )
    op.create_index("ix_idempotency_records_expires_at", "idempotency_records", ["expires_at"])
    op.create_index(
        "ix_idempotency_records_stored_bytes", "idempotency_records", ["tenant_id", "stored_bytes"]
    )
    op.create_index(
        "ix_idempotency_records_tenant_id", "idempotency_records", ["tenant_id", "claimed_at"]
    )
    op.create_table(
        "limit_plans",
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("body", Json, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_limit_plans"),
    )
    op.create_table(
        "limit_rejections",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.Column("reason", sa.String(120), nullable=False),
        sa.Column("rejected", sa.BigInteger, nullable=False),
        sa.Column("queued", sa.BigInteger, nullable=False),
        sa.Column("queued_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "at", "reason", name="pk_limit_rejections"),
    )
    op.create_table(
        "operators",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("disabled_at", UtcDateTime, nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_operators"),
        sa.UniqueConstraint("secret_sha256", name="uq_operators_secret_sha256"),
    )
    op.create_table(
        "queue_heartbeats",
        sa.Column("queue", sa.String(40), nullable=False),
        sa.Column("at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("queue", name="pk_queue_heartbeats"),
    )
    op.create_table(
        "stored_completions",
        sa.Column("id", sa.String(80), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(300), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stored_completions"),
    )
    op.create_index("ix_stored_completions_expires_at", "stored_completions", ["expires_at"])
    op.create_index(
        "ix_stored_completions_stored_bytes", "stored_completions", ["tenant_id", "stored_bytes"]
    )
    op.create_index(
        "ix_stored_completions_tenant_created",
        "stored_completions",
        ["tenant_id", "created_at", "id"],
    )
    op.create_table(
        "stored_responses",
        sa.Column("id", sa.String(80), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("previous_id", sa.String(80), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.String(20), nullable=True),
        sa.Column("lease_until", UtcDateTime, nullable=True),
        sa.Column("stored_bytes", sa.BigInteger, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stored_responses"),
    )
    op.create_index("ix_stored_responses_expires_at", "stored_responses", ["expires_at"])
    op.create_index("ix_stored_responses_lease_until", "stored_responses", ["lease_until"])
    op.create_index(
        "ix_stored_responses_stored_bytes", "stored_responses", ["tenant_id", "stored_bytes"]
    )
    op.create_index("ix_stored_responses_tenant_id", "stored_responses", ["tenant_id", "id"])
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("display_name", sa.String(200), nullable=False),
        sa.Column("plan", sa.String(120), nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("timezone", sa.String(64), nullable=False),
        sa.Column("settings", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("base_model", sa.String(120), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("path", sa.String(1024), nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("removed_at", UtcDateTime, nullable=True),
        sa.Column("quarantined_at", UtcDateTime, nullable=True),
        sa.Column("quarantine_reason", sa.String(120), server_default="", nullable=False),
        sa.CheckConstraint("rank > 0", name=op.f("ck_adapters_rank_positive")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
    )
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("custom_id", sa.String(512), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("result", sa.Text, nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_batch_lines_batch_id"),
        sa.PrimaryKeyConstraint("batch_id", "number", name="pk_batch_lines"),
    )
    op.create_index("ix_batch_lines_state", "batch_lines", ["batch_id", "state", "number"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.String(80), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("item_id", sa.String(80), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["conversation_id"],
            ["conversations.id"],
            name="fk_conversation_items_conversation_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("conversation_id", "position", name="pk_conversation_items"),
    )
    op.create_index(
        "ix_conversation_items_item_id",
        "conversation_items",
        ["conversation_id", "item_id"],
        unique=True,
    )
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="fk_file_chunks_file_id"),
        sa.PrimaryKeyConstraint("file_id", "number", name="pk_file_chunks"),
    )
    op.create_table(
        "limits",
        sa.Column("id", BigKey, autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("scope", sa.String(20), nullable=False),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.Column("period_s", sa.Integer, nullable=False),
        sa.Column("target", sa.String(120), nullable=False),
        sa.Column("limit_count", sa.BigInteger, nullable=False),
        sa.Column("shadow", sa.Boolean, nullable=False),
        sa.Column("by_operator", sa.Boolean, nullable=False),
        sa.CheckConstraint("limit_count > 0", name=op.f("ck_limits_limit_positive")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_limits_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_limits"),
        sa.UniqueConstraint(
            "tenant_id",
            "scope",
            "unit",
            "period_s",
            "target",
            name="uq_limits_tenant_id_scope_unit_period_s_target",
        ),
    )
    op.create_table(
        "members",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("email", sa.String(320), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("password_hash", sa.String(200), nullable=True),
        sa.Column("oidc_subject", sa.String(255), nullable=True),
        sa.Column("invitation_sha256", sa.String(64), nullable=True),
        sa.Column("invitation_expires_at", UtcDateTime, nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("disabled_at", UtcDateTime, nullable=True),
        sa.Column("last_seen_at", UtcDateTime, nullable=True),
        sa.Column("password_by", sa.String(20), nullable=True),
        sa.Column("invitation_by", sa.String(20), nullable=True),
        sa.Column("oidc_by", sa.String(20), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_members_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_members"),
        sa.UniqueConstraint("tenant_id", "email", name="uq_members_tenant_id_email"),
    )
    op.create_index("ix_members_invitation", "members", ["invitation_sha256"], unique=True)
    op.create_index(
        "ix_members_tenant_subject", "members", ["tenant_id", "oidc_subject"], unique=True
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("archived_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_projects_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_projects_tenant_id_name"),
    )
    op.create_table(
        "prompt_templates",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("current_version", sa.Integer, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("removed_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_prompt_templates_tenant_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_prompt_templates"),
    )
    op.create_index("ix_prompt_templates_tenant_name", "prompt_templates", ["tenant_id", "name"])
    op.create_table(
        "stored_response_events",
        sa.Column("response_id", sa.String(80), nullable=False),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["response_id"],
            ["stored_responses.id"],
            name="fk_stored_response_events_response_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("response_id", "first", name="pk_stored_response_events"),
    )
    op.create_table(
        "stored_response_items",
        sa.Column("response_id", sa.String(80), nullable=False),
        sa.Column("item_id", sa.String(80), nullable=False),
        sa.ForeignKeyConstraint(
            ["response_id"],
            ["stored_responses.id"],
            name="fk_stored_response_items_response_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("response_id", "item_id", name="pk_stored_response_items"),
    )
    op.create_index("ix_stored_response_items_item_id", "stored_response_items", ["item_id"])
    op.create_table(
        "tenant_domains",
        sa.Column("domain", sa.String(253), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("proved_at", UtcDateTime, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_tenant_domains_tenant_id"),
        sa.PrimaryKeyConstraint("domain", name="pk_tenant_domains"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("project_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("last_four", sa.String(4), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("routing", Json, nullable=True),
        sa.Column("allowed_ips", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=True),
        sa.Column("revoked_at", UtcDateTime, nullable=True),
        sa.Column("last_used_at", UtcDateTime, nullable=True),
        sa.Column("rotated_to", sa.String(40), nullable=True),
        sa.Column("origin_id", sa.String(40), nullable=True),
        sa.Column("member_id", sa.String(40), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_api_keys_project_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id"),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("secret_sha256", name="uq_api_keys_secret_sha256"),
    )
    op.create_index("ix_api_keys_tenant_project", "api_keys", ["tenant_id", "project_id"])
    op.create_table(
        "prompt_versions",
        sa.Column("prompt_id", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("messages", Json, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("created_by", sa.String(40), nullable=False),
        sa.ForeignKeyConstraint(
            ["prompt_id"], ["prompt_templates.id"], name="fk_prompt_versions_prompt_id"
        ),
        sa.PrimaryKeyConstraint("prompt_id", "version", name="pk_prompt_versions"),
    )
    op.create_table(
        "dashboard_sessions",
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("member_id", sa.String(40), nullable=True),
        sa.Column("key_id", sa.String(40), nullable=True),
        sa.Column("operator", sa.Boolean, nullable=False),
        sa.Column("operator_name", sa.String(40), nullable=True),
        sa.Column("chosen_tenant", sa.String(40), nullable=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime, nullable=False),
        sa.Column("revoked_at", UtcDateTime, nullable=True),
        sa.ForeignKeyConstraint(
            ["chosen_tenant"], ["tenants.id"], name="fk_dashboard_sessions_chosen_tenant"
        ),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_dashboard_sessions_key_id"),
        sa.ForeignKeyConstraint(
            ["member_id"], ["members.id"], name="fk_dashboard_sessions_member_id"
        ),
        sa.PrimaryKeyConstraint("secret_sha256", name="pk_dashboard_sessions"),
    )
    _guard_audit_log()


def downgrade() -> None:
    op.drop_table("dashboard_sessions")
    op.drop_table("prompt_versions")
    op.drop_table("api_keys")
    op.drop_table("tenant_domains")
    op.drop_table("stored_response_items")
    op.drop_table("stored_response_events")
    op.drop_table("prompt_templates")
    op.drop_table("projects")
    op.drop_table("members")
    op.drop_table("limits")
    op.drop_table("file_chunks")
    op.drop_table("conversation_items")
    op.drop_table("batch_lines")
    op.drop_table("adapters")
    op.drop_table("tenants")
    op.drop_table("stored_responses")
    op.drop_table("stored_completions")
    op.drop_table("queue_heartbeats")
    op.drop_table("operators")
    op.drop_table("limit_rejections")
    op.drop_table("limit_plans")
    op.drop_table("idempotency_records")
    op.drop_table("files")
    op.drop_table("epochs")
    op.drop_table("engine_drains")
    op.drop_table("dead_letters")
    op.drop_table("conversations")
    op.drop_table("casbin_rule")
    op.drop_table("batches")
    op.drop_table("audit_log")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("drop function tollhouse_audit_log()")


def _guard_audit_log() -> None:
    """No entry of the audit log is changed or deleted."""
    if op.get_bind().dialect.name != "postgresql":
        for action in ("update", "delete"):
            op.execute(
                f"create trigger append_only_audit_log_{action} before {action} on audit_log"
                " begin select raise(abort, 'audit_log is append-only'); end"
            )
        return
    op.execute(
        """create function tollhouse_audit_log() returns trigger language plpgsql as $$
        begin
            raise exception 'audit_log is append-only';
        end $$"""
    )
    op.execute(
        "create trigger append_only before update or delete on audit_log"
        " for each row execute function tollhouse_audit_log()"
    )
