"""Triggers that reject changes of append-only rows and of final invoices.

The migration runs the statements. A retention job or a test that must delete rows calls
`allow_maintenance` in its transaction.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import text
from sqlalchemy.orm import Session

APPEND_ONLY = (
    "ledger_transactions",
    "ledger_entries",
    "usage_events",
    "charges",
    "adjustments",
    "credit_uses",
    "credit_notes",
    "engine_receipts",
)
_FROZEN = (
    "number",
    "tenant_id",
    "seller_id",
    "period_id",
    "currency",
    "subtotal_minor",
    "promo_minor",
    "tax_minor",
    "total_minor",
    "prepaid_minor",
    "due_minor",
    "exact",
    "final_at",
)


def statements(dialect: str) -> list[str]:
    """DDL that creates the triggers, in order."""
    return _postgresql() if dialect == "postgresql" else _sqlite()


def drop_statements(dialect: str) -> list[str]:
    """DDL that drops the trigger functions, which remain after the tables are dropped."""
    if dialect != "postgresql":
        return []
    return [
        "drop function if exists tollhouse_append_only() cascade",
        "drop function if exists tollhouse_final_invoice() cascade",
        "drop function if exists tollhouse_final_line() cascade",
    ]


def ledger_statements(dialect: str) -> list[str]:
    """DDL of the checks at commit and of TRUNCATE. SQLite has neither deferred triggers nor TRUNCATE;
    there the ledger's own check and the audit remain."""
    if dialect != "postgresql":
        return []
    made = [
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
        end $$""",
        "create constraint trigger sum_to_zero after insert on ledger_entries"
        " deferrable initially deferred for each row execute function tollhouse_sum_to_zero()",
    ]
    return made + [truncate_guard(table) for table in (*APPEND_ONLY, "usage_events_default")]


def truncate_guard(table: str) -> str:
    return (
        f"create trigger append_only_truncate before truncate on {table} "
        "for each statement execute function tollhouse_append_only()"
    )


def drop_ledger_statements(dialect: str) -> list[str]:
    if dialect != "postgresql":
        return []
    tables = (*APPEND_ONLY, "usage_events_default")
    return [
        "drop function if exists tollhouse_sum_to_zero() cascade",
        *(f"drop trigger if exists append_only_truncate on {table}" for table in tables),
    ]


def append_only_function() -> str:
    return """create or replace function tollhouse_append_only()
        returns trigger language plpgsql as $$
        begin
            if current_setting('tollhouse.maintenance', true) = 'on' then
                if tg_op = 'DELETE' then return old; end if;
                return new;
            end if;
            raise exception '% is append-only: correct it with a new row', tg_table_name;
        end $$"""


def allow_maintenance(session: Session) -> None:
    """Disable the append-only triggers for this transaction. PostgreSQL only; used by retention."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("set local tollhouse.maintenance = 'on'"))


@contextmanager
def open_for_update(session: Session, table: str) -> Iterator[None]:
    """Let rows of an append-only table be updated inside the block, on both databases."""
    if session.get_bind().dialect.name == "postgresql":
        allow_maintenance(session)
        yield
        session.execute(text("set local tollhouse.maintenance = 'off'"))
        return
    session.execute(text(f"drop trigger append_only_{table}_update"))
    yield
    session.execute(text(sqlite_append_only(table)[0]))


def _postgresql() -> list[str]:
    changed = " or ".join(f"new.{name} is distinct from old.{name}" for name in _FROZEN)
    made = [
        "create table usage_events_default partition of usage_events default",
        append_only_function(),
        f"""create function tollhouse_final_invoice() returns trigger language plpgsql as $$
        begin
            if old.status = 'draft' then return coalesce(new, old); end if;
            if tg_op = 'DELETE' or new.status = 'draft' or {changed} then
                raise exception 'invoice % is final: a credit note corrects it', old.label;
            end if;
            return new;
        end $$""",
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
        end $$""",
        """create trigger final_invoice before update or delete on invoices
        for each row execute function tollhouse_final_invoice()""",
        """create trigger final_line before insert or update or delete on invoice_lines
        for each row execute function tollhouse_final_line()""",
    ]
    made += [
        f"create trigger append_only before update or delete on {table} "
        "for each row execute function tollhouse_append_only()"
        for table in APPEND_ONLY
    ]
    return made


def _sqlite() -> list[str]:
    changed = " or ".join(f"new.{name} is not old.{name}" for name in _FROZEN)
    lines_of_final = "(select status from invoices where id = {row}.invoice_id) <> 'draft'"
    made = [
        f"""create trigger final_invoice_update before update on invoices
        when old.status <> 'draft' and (new.status = 'draft' or {changed})
        begin select raise(abort, 'the invoice is final: a credit note corrects it'); end""",
        """create trigger final_invoice_delete before delete on invoices
        when old.status <> 'draft'
        begin select raise(abort, 'the invoice is final: a credit note corrects it'); end""",
    ]
    for action, row in (("insert", "new"), ("update", "old"), ("delete", "old")):
        made.append(
            f"""create trigger final_line_{action} before {action} on invoice_lines
            when {lines_of_final.format(row=row)}
            begin select raise(abort, 'the lines of a final invoice do not change'); end"""
        )
    for table in APPEND_ONLY:
        made += sqlite_append_only(table)
    return made


def append_only(dialect: str, table: str) -> list[str]:
    """DDL of the triggers of a table that a later migration adds."""
    if dialect != "postgresql":
        return sqlite_append_only(table)
    return [
        f"create trigger append_only before update or delete on {table} "
        "for each row execute function tollhouse_append_only()",
        truncate_guard(table),
    ]


def sqlite_append_only(table: str) -> list[str]:
    """DDL of one table's triggers. A migration that copies the table must create them again."""
    return [
        f"""create trigger append_only_{table}_{action} before {action} on {table}
        begin select raise(abort, '{table} is append-only: correct it with a new row'); end"""
        for action in ("update", "delete")
    ]
