"""Database triggers that make the audit log append-only. Created by the migration."""


def statements(dialect: str) -> list[str]:
    """DDL that creates the triggers, in order."""
    if dialect != "postgresql":
        return [
            f"""create trigger append_only_audit_log_{action} before {action} on audit_log
            begin select raise(abort, 'audit_log is append-only'); end"""
            for action in ("update", "delete")
        ]
    return [
        """create function tollhouse_audit_log() returns trigger language plpgsql as $$
        begin
            raise exception 'audit_log is append-only';
        end $$""",
        """create trigger append_only before update or delete on audit_log
        for each row execute function tollhouse_audit_log()""",
    ]


def drop_statements(dialect: str) -> list[str]:
    """DDL for what remains after the table and its triggers are dropped."""
    if dialect != "postgresql":
        return []
    return ["drop function if exists tollhouse_audit_log() cascade"]
