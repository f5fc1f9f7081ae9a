"""Export schedules and jobs as JSON, for the API and the commands."""

from typing import Any

from billing.exports.schedules import export_of_options
from billing.exports.tables import ExportJob, ExportSchedule


def schedule_json(row: ExportSchedule) -> dict[str, Any]:
    table = export_of_options(row.what, row.options).table
    return {
        "id": row.id,
        "tenant_id": row.tenant_id,
        "what": row.what,
        "focus_version": table.version if table is not None else None,
        "dataset": table.dataset if table is not None else None,
        "columns": row.options.get("focus", {}).get("columns"),
        "format": row.format,
        "every": row.every,
        "delay_hours": row.options["delay_hours"],
        "destination": row.destination,
        "next_at": row.next_at.isoformat(),
        "paused_at": row.paused_at.isoformat() if row.paused_at else None,
        "last_error": row.last_error,
    }


def job_json(row: ExportJob) -> dict[str, Any]:
    return {
        "id": row.id,
        "schedule_id": row.schedule_id,
        "tenant_id": row.tenant_id,
        "what": row.what,
        "format": row.format,
        "start": row.starts_at.isoformat(),
        "end": row.ends_at.isoformat(),
        "status": row.status,
        "attempts": row.attempts,
        "rows": row.rows,
        "bytes": row.bytes,
        "sha256": row.sha256,
        "address": row.address,
        "error": row.error,
        "done_at": row.done_at.isoformat() if row.done_at else None,
    }
