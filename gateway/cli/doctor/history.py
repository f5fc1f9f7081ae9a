"""Check that the database has everything that the marks outside of it name."""

from billing.recovery import guard, marks, places
from billing.restores import restores
from core.clock import Clock
from core.database import Database, Limits
from core.settings import Settings
from gateway.cli.doctor.check import Finding, bad, good, unused, warn
from migrations.run import current, head


def history(settings: Settings, clock: Clock) -> Finding:
    """Report a database that was restored from a backup and not recovered."""
    database = Database(settings.effective_database_url, limits=Limits(connect_s=2))
    try:
        if current(database) != head():
            return unused("the database has no current schema")
        found = guard.check(database, settings, clock, everywhere=True)
        with database.read() as session:
            last = marks.latest(session)
    finally:
        database.close()
    if found is not None:
        return bad(
            f"the database was restored from a backup; nothing is numbered or collected. {found.reason}",
            restores.NEXT_STEP,
        )
    if last is None:
        return unused("nothing is marked yet")
    summary = f"mark {last.position} of {last.at:%Y-%m-%d %H:%M} UTC"
    here = marks.filed([places.local(settings)])
    if not here and settings.database_url and not settings.restore_store:
        return warn(
            f"{summary} is not kept on this machine",
            "Set TOLLHOUSE_RESTORE_STORE, so that every machine notices a restore.",
        )
    return good(summary)
