"""Decides whether an error means that a record can never be stored, or that it is to be retried."""

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError

# SQLSTATE classes of PostgreSQL: data exception, integrity constraint violation.
_PERMANENT = ("22", "23")


def is_permanent(error: BaseException) -> bool:
    """True for faults of the record: its data or a constraint. Everything else passes or is fixed
    by an operator: an outage, a read-only standby, a schema that is not migrated yet, a pooler."""
    if isinstance(error, DBAPIError):
        sqlstate = getattr(error.orig, "sqlstate", None)
        if sqlstate is not None:
            return str(sqlstate).startswith(_PERMANENT)
        return isinstance(error, DataError | IntegrityError)  # SQLite has no SQLSTATE
    if isinstance(error, StatementError) and error.orig is not None:
        return is_permanent(error.orig)
    return isinstance(error, ValueError | LookupError | TypeError | OverflowError)


def brief(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
