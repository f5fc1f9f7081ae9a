"""A ZIP archive of all that is stored of a tenant: a file of JSON Lines for each table, its files and its
adapters. Encrypted texts are opened; secrets are left out."""

import json
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from io import RawIOBase
from typing import IO, Any

from sqlalchemy import RowMapping, select
from sqlalchemy.orm import Session

from core.database import Database
from core.errors import NotFound
from core.sealing import Sealer
from core.settings import Settings
from core.tenants.scope import TenantScope
from gateway.admin.stored_data.tables import SECRET, names_of_tenants, of_tenant, table_of

_AT_ONCE = 1000
_FILES = "file_chunks"
_READ_ME = """All that is stored of this organisation.

tables/NAME.jsonl   the rows of a table, one JSON object a line; amounts are picounits (10^-12)
files/ID            an uploaded or written file; tables/files.jsonl has its name
adapters/DIGEST/    the files of an adapter

Not in it: secrets, which are stored as hashes or sealed; requests that were not stored; usage whose
days were moved to ClickHouse (`tollhouse export run usage` has it).
"""


@dataclass(frozen=True, slots=True)
class TenantExport:
    database: Database
    settings: Settings
    sealer: Sealer

    def write(self, scope: TenantScope, target: IO[bytes] | RawIOBase) -> dict[str, int]:
        """From one snapshot of the database. Returns the rows of each table that has some."""
        counts: dict[str, int] = {}
        with (
            zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            self.database.snapshot() as session,
        ):
            archive.writestr("README.txt", _READ_ME)
            for name in names_of_tenants():
                if name != _FILES:
                    counts[name] = self._table(archive, session, name, scope.tenant_id)
            counts["files"] = self._files(archive, session, scope.tenant_id)
            self._adapters(archive, scope.tenant_id)
        return {name: count for name, count in counts.items() if count}

    def _table(self, archive: zipfile.ZipFile, session: Session, name: str, tenant_id: str) -> int:
        rows, count = self._rows(session, name, tenant_id), 0
        first = next(rows, None)
        if first is None:
            return 0
        with archive.open(f"tables/{name}.jsonl", "w", force_zip64=True) as file:
            while first is not None:
                file.write(json.dumps(first, ensure_ascii=False).encode() + b"\n")
                count += 1
                first = next(rows, None)
        return count

    def _rows(self, session: Session, name: str, tenant_id: str) -> Iterator[dict[str, Any]]:
        table = table_of(name)
        columns = [column for column in table.columns if column.name not in SECRET]
        query = select(*columns).where(of_tenant(name, tenant_id))
        found = session.execute(query.execution_options(yield_per=_AT_ONCE))
        for row in found.mappings():
            yield {
                key: self._sealed(tenant_id, row) if key == "sealed" else _plain(value)
                for key, value in row.items()
            }

    def _sealed(self, tenant_id: str, row: RowMapping) -> Any:
        """None where it was stored under another operator token."""
        sealed = row["sealed"]
        try:
            if "first" in row:
                name = f"{row['response_id']}/{row['first']}"
                return _parsed(zlib.decompress(self.sealer.open(tenant_id, name, sealed)))
            name = row["id"] if "id" in row else f"{row['conversation_id']}/{row['item_id']}"
            return _parsed(self.sealer.open(tenant_id, name, sealed))
        except NotFound:
            return None

    def _files(self, archive: zipfile.ZipFile, session: Session, tenant_id: str) -> int:
        files, chunks, count = table_of("files"), table_of(_FILES), 0
        for file_id in session.scalars(select(files.c.id).where(files.c.tenant_id == tenant_id)):
            content = (
                select(chunks.c.content)
                .where(chunks.c.file_id == file_id)
                .order_by(chunks.c.number)
            )
            with archive.open(f"files/{file_id}", "w", force_zip64=True) as file:
                for chunk in session.scalars(content.execution_options(yield_per=1)):
                    file.write(chunk)
            count += 1
        return count

    def _adapters(self, archive: zipfile.ZipFile, tenant_id: str) -> None:
        folder = self.settings.data_dir / "adapters" / tenant_id
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.name[0] != ".":
                archive.write(path, f"adapters/{path.relative_to(folder)}")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return _parsed(value)
    return value


def _parsed(value: bytes) -> Any:
    """JSON where it is, else text, else base64."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}
    try:
        return json.loads(text)
    except ValueError:
        return text
