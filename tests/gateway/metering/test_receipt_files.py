"""Recovery from engines' receipt files: what is stored, and what is left out and counted as such."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.pricing.prices import ensure_default_prices
from billing.usage.tables import EngineReceipt, ParkedEvent, UsageEventRow, UsageRetention
from core.clock import FakeClock
from core.database import Database
from core.errors import NotFound
from core.events import UsageKind
from core.ids import REQUEST, floor_id, new_id
from core.settings import Settings
from core.tenants.models import Tenant
from engine.protocol import FinishReason, Receipt
from engine.receipts import Receipts
from gateway.metering import receipt_files as files_module
from gateway.metering.engine_receipts import ReceiptNote, opened_of
from gateway.metering.receipt_files import files_and_events, receipt_files, recover
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_opened, move_to_outbox
from tests.gateway.metering import test_spool as spooled
from tests.gateway.metering.spool_rows import closed, opened

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Files:
    """A database with one tenant and its price, and an engine's receipt file."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.clock = FakeClock(NOW)
        self.settings = Settings(data_dir=directory)
        self.path = directory / "receipts" / "engine.log"
        self.path.parent.mkdir()
        with database.transaction() as session:
            self.price = ensure_default_prices(session, FakeClock(NOW - timedelta(days=90)), "m").id
            session.add(Tenant(id="org_a", name="a", display_name="A", created_at=NOW))

    def id(self, minutes_ago: float = 60) -> str:
        return new_id(REQUEST, int((NOW - timedelta(minutes=minutes_ago)).timestamp() * 1000))

    def receipt(
        self, name: str, *, tenant: str = "org_a", prompts: int = 1, **note: str
    ) -> Receipt:
        described = ReceiptNote(
            project_id="proj_a",
            key_id="key_a",
            model="m",
            adapter=None,
            price_version=note.get("price", self.price),
            route="/v1/completions",
            kind=UsageKind.GENERATION,
            member_id="mem_a",
            batch_job=None,
            prompts=prompts,
        )
        found = replace(spooled.receipt(name), namespace=tenant)
        return replace(found, note=msgspec.json.encode(described).decode())

    def write(self, receipts: Iterable[Receipt]) -> None:
        kept = Receipts(1000, str(self.path), kept_days=365)
        for each in receipts:
            kept.add("gateway", each)
        kept.close()

    def recover(self, *, dry_run: bool = False) -> files_module.Recovered:
        return recover(
            *(self.database, self.settings, self.clock, [self.path]),
            dry_run=dry_run,
            min_age_s=600,
        )

    def lost(self) -> tuple[str, ...]:
        with self.database.read() as session:
            return self._lost(session)

    def _lost(self, session: Session) -> tuple[str, ...]:
        found = files_and_events(session, self.settings, self.clock, [self.path])
        return found[0].request_ids if found else ()

    def stored(self) -> dict[str, UsageEventRow]:
        with self.database.read() as session:
            return {row.request_id: row for row in session.scalars(select(UsageEventRow))}


@pytest.fixture
def files(sqlite_database: Database, tmp_path: Path) -> Files:
    (tmp_path / "data").mkdir()
    return Files(sqlite_database, tmp_path / "data")


def test_what_the_database_lacks_is_stored_once_with_its_receipts(files: Files) -> None:
    one, two = files.id(61), files.id(60)
    parts = [files.receipt(f"{two}.{number}", prompts=2) for number in (0, 1)]
    files.write([files.receipt(one), *parts])
    assert set(files.lost()) == {one, two}
    planned = files.recover(dry_run=True)
    assert (planned.stored, planned.in_files, files.stored()) == ([one, two], 2, {})
    done = files.recover()
    assert (done.in_files, done.known, done.stored, done.parked) == (2, 0, [one, two], [])
    rows = files.stored()
    row = rows[two]
    assert (row.input_tokens, row.cached_tokens, row.output_tokens, row.waived_tokens) == (
        *(20, 8, 12, 2),
    )
    assert (row.tenant_id, row.project_id, row.key_id) == ("org_a", "proj_a", "key_a")
    assert (row.model, row.route, row.member_id) == ("m", "/v1/completions", "mem_a")
    assert rows[one].occurred_at == NOW - timedelta(minutes=61)
    with files.database.read() as session:
        kept = session.execute(
            select(EngineReceipt.request_id, EngineReceipt.prompt_tokens,
                   EngineReceipt.cached_tokens, EngineReceipt.generated_tokens)
            .order_by(EngineReceipt.request_id)
        ).all()  # fmt: skip
    assert [tuple(each) for each in kept] == [
        (name, 10, 4, 7) for name in (one, f"{two}.0", f"{two}.1")
    ]
    again = files.recover()
    assert (again.in_files, again.known, again.stored) == (2, 2, [])
    assert files.lost() == ()


@pytest.mark.parametrize("column", ["prompt", "cached", "generated"])
def test_the_audit_finds_counts_that_are_not_the_file_s(files: Files, column: str) -> None:
    one, two = files.id(61), files.id(60)
    written = [files.receipt(one), *(files.receipt(f"{two}.{n}", prompts=2) for n in (0, 1))]
    files.write(written)
    files.recover()
    with files.database.transaction() as session:
        assert files_and_events(session, files.settings, files.clock, [files.path]) == []
        row = session.get_one(EngineReceipt, (f"{two}.1", ""))
        other = {f"{column}_tokens": getattr(row, f"{column}_tokens") + 1}
        fields = ("prompt_tokens", "cached_tokens", "generated_tokens", "received_at")
        kept = {name: getattr(row, name) for name in fields}
        # Another replica's receipt of the same prompt explains the file's as well.
        session.add(EngineReceipt(request_id=f"{one}", engine_id="other", **kept | other))
        session.flush()
        assert files_and_events(session, files.settings, files.clock, [files.path]) == []
    files.path.write_text(
        files.path.read_text().replace(
            f'"{column}":{getattr(written[2], column)}',
            f'"{column}":{getattr(written[2], column) + 1}',
        )
    )
    with files.database.read() as session:
        (found,) = files_and_events(session, files.settings, files.clock, [files.path])
    assert (found.check, found.kind, found.count) == ("receipt files/receipts", "amount", 2)


@pytest.mark.parametrize(
    ("attempt", "answer", "differs"),
    [("abort", "stop", 0), ("error", "length", 0), ("abort", "abort", 1), ("stop", "stop", 1)],
)
def test_an_attempt_that_another_replica_replaced_is_no_difference(
    files: Files, attempt: str, answer: str, differs: int
) -> None:
    """An engine stood still, its request moved to another, and the gateway ended before the first one
    could say what it had done: its file alone knows. Found by a round of chaos."""
    name = files.id()
    whole = replace(files.receipt(name), finish_reason=FinishReason(answer))
    files.write([whole])
    files.recover()
    files.path.unlink()
    files.write([replace(whole, generated=3, delivered=3, finish_reason=FinishReason(attempt))])
    with files.database.read() as session:
        found = files_and_events(session, files.settings, files.clock, [files.path])
    assert sum(each.count for each in found) == differs


def test_a_prompt_that_was_processed_in_part_is_opened_with_all_its_tokens(files: Files) -> None:
    name = files.id()
    parts = [replace(files.receipt(f"{name}.{number}"), unprocessed=3) for number in (0, 1)]
    found = opened_of(name, parts, "engine")
    assert found is not None and found.prompt_tokens == 2 * (10 + 3)


def test_requests_that_may_still_run_are_left_alone(files: Files) -> None:
    young, old = files.id(9), files.id(11)
    files.write([files.receipt(young), files.receipt(old)])
    assert files.lost() == (old,)
    assert files.recover().stored == [old]


def test_what_waits_in_a_spool_of_this_machine_is_known(files: Files) -> None:
    running, ended = files.id(), files.id()
    spool = SpoolFile(files.settings.data_dir / "spool" / "1.db")
    spool.commit([insert_opened(opened(running)), *move_to_outbox(closed(ended))])
    files.write([files.receipt(running), files.receipt(ended)])
    assert files.lost() == ()
    found = files.recover()
    assert (found.in_files, found.known, found.stored) == (2, 2, [])
    spool.close()


def test_receipts_without_a_payer_of_ours_are_named_and_not_stored(files: Files) -> None:
    guard, stranger = files.id(62), files.id(61)
    files.write(
        [replace(files.receipt(guard), note=""), files.receipt(stranger, tenant="org_gone")]
    )
    found = files.recover()
    assert (found.without_payer, found.unknown_tenant, found.stored) == ([guard], [stranger], [])
    assert files.lost() == (stranger,), "the restored database may lack the tenant itself"
    assert files.stored() == {}


def test_requests_of_months_that_were_dropped_are_too_old(files: Files) -> None:
    before, after = files.id(90), files.id(70)
    with files.database.transaction() as session:
        session.add(
            UsageRetention(
                floor_id=floor_id(REQUEST, NOW - timedelta(minutes=80)),
                kept_from=NOW, events=1, dropped_at=NOW,
            )
        )  # fmt: skip
    files.write([files.receipt(before), files.receipt(after)])
    found = files.recover()
    assert (found.too_old, found.stored, found.in_files) == (1, [after], 2)


def test_what_the_database_refuses_is_parked_there_and_then_known(files: Files) -> None:
    good, bad = files.id(62), files.id(61)
    files.write([files.receipt(good), files.receipt(bad, price="price_gone")])
    found = files.recover()
    assert (found.stored, found.parked) == ([good], [bad])
    with files.database.read() as session:
        assert list(session.scalars(select(ParkedEvent.request_id))) == [bad]
    assert files.recover().known == 2 and files.lost() == ()


def test_every_batch_of_a_long_file_is_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_BATCH", 2)
    names = [files.id(70 - number) for number in range(5)]
    files.write([files.receipt(name) for name in names])
    assert set(files.lost()) == set(names)
    found = files.recover()
    assert (found.in_files, found.stored) == (5, names)


def test_files_are_found_by_name_by_directory_and_beside_the_data(files: Files) -> None:
    files.write([])
    other = files.settings.data_dir / "other.txt"
    other.write_text("")
    assert receipt_files(files.settings) == [files.path]
    assert receipt_files(files.settings, [str(other)]) == [other]
    both = receipt_files(files.settings, [str(other), str(files.path.parent)])
    assert both == [other, files.path]
    with pytest.raises(NotFound, match=r"gone\.log"):
        receipt_files(files.settings, [str(other), str(files.path.parent / "gone.log")])
    assert receipt_files(Settings(data_dir=other.parent / "empty")) == []
