"""What FOCUS asks for with the data: the schema, the instance of the dataset, and how recent it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from billing.exports.focus.tables import FocusTable

GENERATOR = "Tollhouse"
_TYPES = {
    "text": "String",
    "json": "JSON",
    "money": "Decimal",
    "quantity": "Decimal",
    "moment": "Date/Time",
    "whole": "Integer",
}
DELIVERY_STYLE = "Overwrite while the billing period is open; a closed period's file never changes."
CORRECTION_STYLE = "Ledger: what was charged is reversed and entered again, in an open period."


def schema_json(table: FocusTable) -> dict[str, Any]:
    """The schema of a table. Its id is that of its columns: another choice is another schema."""
    columns = [
        {
            "ColumnName": each.name,
            "DataType": _TYPES[each.type],
            "AllowsNulls": each.nullable,
            **({"AllowedValues": list(each.values)} if each.values else {}),
        }
        for each in table.columns
    ]
    digest = sha256("\n".join(table.names).encode()).hexdigest()[:12]
    return {
        "SchemaId": f"{table.dataset}-{table.version}-{digest}",
        "FocusVersion": table.version,
        "Dataset": table.dataset,
        "DataGenerator": GENERATOR,
        "ColumnDefinition": columns,
    }


def file_json(table: FocusTable, updated_at: datetime) -> dict[str, Any]:
    """For a file that is written once, by hand."""
    return {
        "Schema": schema_json(table),
        "Recency": {"DatasetInstanceLastUpdated": updated_at.isoformat()},
    }


@dataclass(frozen=True, slots=True)
class Sector:
    """A billing period that was delivered as one file."""

    starts_at: datetime
    ends_at: datetime
    complete: bool  # it is closed
    file: str
    rows: int
    sha256: str
    updated_at: datetime


def delivery_json(
    table: FocusTable, instance: str, updated_at: datetime, sectors: Sequence[Sector]
) -> dict[str, Any]:
    """For each delivery: its schema, its instance, and which billing periods are complete."""
    return {
        "DatasetInstance": {
            "DatasetInstanceId": instance,
            "DatasetInstanceName": f"FOCUS {table.version} {table.dataset}",
            "DataGenerator": GENERATOR,
            "x_DeliveryStyle": DELIVERY_STYLE,
            "x_CorrectionStyle": CORRECTION_STYLE,
        },
        "Schema": schema_json(table),
        "Recency": {
            "DatasetInstanceId": instance,
            "DatasetInstanceLastUpdated": updated_at.isoformat(),
            "DatasetInstanceComplete": all(each.complete for each in sectors),
            "TimeSectors": [
                {
                    "TimeSectorStart": each.starts_at.isoformat(),
                    "TimeSectorEnd": each.ends_at.isoformat(),
                    "TimeSectorLastUpdated": each.updated_at.isoformat(),
                    "TimeSectorComplete": each.complete,
                    "x_File": each.file,
                    "x_Rows": each.rows,
                    "x_Sha256": each.sha256,
                }
                for each in sectors
            ],
        },
    }
