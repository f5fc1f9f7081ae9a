"""Erases an end user's lines from a tenant's batches: of their files, and of those that still run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.batches import files
from core.batches.jobs import DONE, FAILED
from core.batches.models import Batch, BatchLine, StoredFile
from core.responses.end_users import end_user_of

ERASED = "end_user_erased"
_MARK = b"\xef\xbb\xbf"  # with which some editors begin a file


@dataclass(frozen=True, slots=True)
class ErasedLines:
    batch_lines: int  # of batches that run
    file_lines: int  # of input, output and error files


def erase_lines(session: Session, tenant_id: str, end_user: str) -> ErasedLines:
    """A line of a file goes; a line of a running batch fails. Lines of an output are found by those of
    its input file, so an output whose input file was deleted keeps them."""
    running = _erase_running(session, tenant_id, end_user)
    removed = 0
    inputs = select(StoredFile).where(
        StoredFile.tenant_id == tenant_id, StoredFile.purpose == "batch"
    )
    for file in session.scalars(inputs).all():
        named = {
            name
            for name, line in _read(session, file)
            if isinstance(line.get("body"), dict)
            and end_user_of(str(line.get("url")), line["body"]) == end_user
        }
        if named:
            removed += _rewrite(session, file, named)
            for output in _outputs_of(session, tenant_id, file.id):
                removed += _rewrite(session, output, named)
    return ErasedLines(running, removed)


def _erase_running(session: Session, tenant_id: str, end_user: str) -> int:
    erased = 0
    with_lines = select(BatchLine.batch_id).distinct()
    batches = select(Batch.id).where(Batch.tenant_id == tenant_id, Batch.id.in_(with_lines))
    for batch_id in session.scalars(batches.order_by(Batch.id)).all():
        batch = session.get_one(Batch, batch_id, with_for_update=True, populate_existing=True)
        lines = select(
            BatchLine.number, BatchLine.custom_id, BatchLine.state, BatchLine.body
        ).where(BatchLine.batch_id == batch_id)
        for number, custom_id, state, body in session.execute(lines).all():
            if end_user_of(batch.endpoint, orjson.loads(body)) != end_user:
                continue
            session.execute(
                update(BatchLine)
                .where(BatchLine.batch_id == batch_id, BatchLine.number == number)
                .values(state=FAILED, body="{}", result=_erased_line(custom_id))
            )
            batch.completed -= state == DONE
            batch.failed += state != FAILED
            erased += 1
    return erased


def _erased_line(custom_id: str) -> str:
    error = {"code": ERASED, "message": "The end user of this request was erased."}
    line = {"id": "batch_req_none", "custom_id": custom_id, "response": None, "error": error}
    return orjson.dumps(line).decode()


def _outputs_of(session: Session, tenant_id: str, input_file_id: str) -> list[StoredFile]:
    ends = select(Batch.output_file_id, Batch.error_file_id).where(
        Batch.tenant_id == tenant_id, Batch.input_file_id == input_file_id
    )
    ids = [each for row in session.execute(ends) for each in row if each is not None]
    owned = select(StoredFile).where(StoredFile.tenant_id == tenant_id)
    return list(session.scalars(owned.where(StoredFile.id.in_(ids))))


def _read(session: Session, file: StoredFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those lines that are requests or results, with their custom ids."""
    for raw in files.lines(session, file, file.bytes):
        line = _line(raw)
        if line is not None:
            yield line["custom_id"], line


def _line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = orjson.loads(raw.removeprefix(_MARK))
    except ValueError:
        return None
    known = isinstance(line, dict) and isinstance(line.get("custom_id"), str)
    return line if known else None


def _rewrite(session: Session, file: StoredFile, named: set[str]) -> int:
    """Without the lines of these custom ids; the number of lines that went."""
    kept, removed = list[bytes](), 0
    for raw in files.lines(session, file, file.bytes):
        line = _line(raw)
        if line is not None and line["custom_id"] in named:
            removed += 1
        else:
            kept.append(raw + b"\n")
    if removed:
        files.replace_content(session, file, kept)
    return removed
