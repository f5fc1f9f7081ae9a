"""Erases an end user's lines from a tenant's batches: of their files, and of those that still run.

Finding them reads all that the tenant has stored; only what holds some is changed, one file or batch in a
transaction, so that a tenant with many files does not keep others from writing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.batches import files
from core.batches.jobs import DONE, FAILED
from core.batches.models import Batch, BatchLine, StoredFile
from core.responses.end_users import end_users_of

ERASED = "end_user_erased"
_AT_ONCE = 500  # rows that are fetched together
_MARK = b"\xef\xbb\xbf"  # with which some editors begin a file


@dataclass(frozen=True, slots=True)
class NamedLines:
    """Where an end user's lines are, with their custom ids."""

    running: dict[str, dict[int, str]]  # of batches that run, by batch and number
    files: dict[str, set[str]]  # by input file


def find(session: Session, tenant_id: str, end_user: str) -> NamedLines:
    """Reads every line of the tenant's batches, so `session` must not be one that writes."""
    files = {}
    inputs = select(StoredFile).where(
        StoredFile.tenant_id == tenant_id, StoredFile.purpose == "batch"
    )
    for file in session.scalars(inputs).all():
        named = {
            name
            for name, line in _read(session, file)
            if isinstance(line.get("body"), dict)
            and end_user in end_users_of(str(line.get("url")), line["body"])
        }
        if named:
            files[file.id] = named
    return NamedLines(_running(session, tenant_id, end_user), files)


def _running(session: Session, tenant_id: str, end_user: str) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    lines = (
        select(
            BatchLine.batch_id,
            Batch.endpoint,
            BatchLine.number,
            BatchLine.custom_id,
            BatchLine.body,
        )
        .join(Batch, Batch.id == BatchLine.batch_id)
        .where(Batch.tenant_id == tenant_id)
    )
    for batch_id, endpoint, number, custom_id, body in session.execute(lines).yield_per(_AT_ONCE):
        if end_user in end_users_of(endpoint, orjson.loads(body)):
            found.setdefault(batch_id, {})[number] = custom_id
    return found


def erase_running(session: Session, batch_id: str, named: dict[int, str]) -> int:
    """These lines of a batch fail. The number of lines; 0 if the batch has ended meanwhile."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    states = select(BatchLine.number, BatchLine.state).where(BatchLine.batch_id == batch_id)
    erased = 0
    for number, state in session.execute(states).all():
        if batch is None or number not in named:
            continue
        session.execute(
            update(BatchLine)
            .where(BatchLine.batch_id == batch_id, BatchLine.number == number)
            .values(state=FAILED, body="{}", result=_erased_line(named[number]))
        )
        batch.completed -= state == DONE
        batch.failed += state != FAILED
        erased += 1
    return erased


def erase_in_files(session: Session, tenant_id: str, file_id: str, named: set[str]) -> int:
    """Their lines go from an input file, and from the output and error files of its batches. The number
    of lines. An output whose input file was deleted keeps them."""
    file = session.get(StoredFile, file_id)
    if file is None:  # deleted meanwhile
        return 0
    return sum(
        _rewrite(session, each, named) for each in (file, *_outputs_of(session, tenant_id, file_id))
    )


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
