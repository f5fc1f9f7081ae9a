"""Opens the database of the settings, with its read replica and the store of moved days."""

from billing.archive.clickhouse import ClickHouseArchive
from billing.usage.raw_rows import RawArchive
from core.database import Database
from core.errors import SettingError
from core.extras import imports_of
from core.sealed_columns import ColumnKeys, seal_columns
from core.settings import Settings
from core.tenants.operator import known_operator_token

SCHEMES = ("clickhouse://", "clickhouses://")


def open_database(settings: Settings) -> Database:
    """Sessions carry the store in their `info`, where `archive_of` finds it. Secrets are sealed with the
    operator's token, where this machine has one."""
    archive = make_archive(settings)
    if token := known_operator_token(settings):
        older = [settings.previous_admin_token] if settings.previous_admin_token else []
        seal_columns(ColumnKeys(token, *older))
    return Database(
        settings.effective_database_url,
        read_url=settings.read_database_url,
        session_info={RawArchive: archive} if archive is not None else None,
    )


def make_archive(settings: Settings) -> RawArchive | None:
    """None without TOLLHOUSE_EVENTS_URL. Connects at the first use."""
    if not settings.events_url:
        return None
    if not settings.events_url.startswith(SCHEMES):
        scheme = settings.events_url.partition(":")[0]
        raise SettingError(
            f"TOLLHOUSE_EVENTS_URL begins with {scheme!r}.",
            next_step="Write clickhouse://user:password@host:8123/database, or clickhouses:// with TLS.",
        )
    if not settings.database_url.startswith("postgresql"):
        raise SettingError(
            "TOLLHOUSE_EVENTS_URL takes closed days from PostgreSQL; SQLite keeps all of them.",
            next_step="Unset it, or set TOLLHOUSE_DATABASE_URL to a PostgreSQL database.",
        )
    with imports_of("clickhouse", "TOLLHOUSE_EVENTS_URL", SettingError):
        from billing.archive.server import ServerClient

    return ClickHouseArchive(ServerClient(settings.events_url))
