"""Receipts reach the books by a way of their own, so that what is lost beside it is found."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from billing.audit import receipts as audit_receipts
from billing.audit import reconcile
from billing.differences import EVERYTHING, Difference
from core.clock import FakeClock
from core.database import Database
from gateway.metering import meter
from gateway.metering.engine_receipts import GUARD_NAMESPACE, ReceiptLog
from gateway.metering.meter import Counts, Ending
from gateway.metering.recovery import Recovery
from gateway.metering.spool import Spool, SpoolFile, read_outbox
from gateway.metering.spool_records import decode_outbox
from gateway.metering.spool_statements import insert_opened
from gateway.metering.usage_sink import SqlUsageSink
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.metering.spool_rows import opened
from tests.gateway.metering.test_spool import Receipts, _ignore, as_if_killed, receipt


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("served")) as deployment:
        yield deployment


def ask(served: Deployment, prompt: object = "one two three") -> str:
    """The request's id, once the engine's receipt is in the database."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    headers = {"authorization": f"Bearer {served.key}"}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-request-id"]
    deadline = time.monotonic() + 30
    while not rows(served, request_id):
        assert time.monotonic() < deadline, "no receipt came"
        time.sleep(0.02)
    return str(request_id)


def rows(served: Deployment, request_id: str) -> list[tuple[str, int, int]]:
    with served.services.database.read() as session:
        query = text(
            "select request_id, prompt_tokens, generated_tokens from engine_receipts"
            " where request_id like :wanted order by request_id"
        )
        return [tuple(row) for row in session.execute(query, {"wanted": f"{request_id}%"})]


def differences(served: Deployment) -> list[Difference]:
    with served.services.database.read() as session:
        return audit_receipts.receipts_and_events(session)


def test_each_prompt_has_its_receipt_and_all_agree_with_the_event(served: Deployment) -> None:
    request_id = ask(served, ["one two", "three four five"])
    assert [name for name, _, _ in rows(served, request_id)] == [
        f"{request_id}.0",
        f"{request_id}.1",
    ]
    ask(served)
    assert differences(served) == []


def test_an_event_that_is_lost_on_its_way_is_found_by_its_receipt(
    served: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed record never reaches the disk: before, its receipt was in the same record."""
    spool = served.services.pipeline.metering.spool
    plain = spool.close

    async def _drop(
        event: object, on_durable: object = None, extra_statements: object = ()
    ) -> None:
        return None

    monkeypatch.setattr(spool, "close", _drop)
    request_id = ask(served)
    monkeypatch.setattr(spool, "close", plain)
    (found,) = differences(served)
    assert (found.kind, found.request_ids) == ("lost", (request_id,))
    with served.services.database.transaction() as session:
        # Only a receipt of long ago must have its event: this request could still be running.
        assert audit_receipts.receipts_and_events(
            session, received_before=served.services.clock.now().replace(year=2020)
        ) == []  # fmt: skip
        _forget(session, request_id)


def test_a_meter_that_counts_wrong_is_found(
    served: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _one_less(prompt_tokens: int, ending: Ending, found: object) -> Counts:
        return Counts(prompt_tokens - 1, 0, ending.delivered, 0)

    monkeypatch.setattr(meter, "counts_of", _one_less)
    request_id = ask(served)
    monkeypatch.undo()
    deadline = time.monotonic() + 30
    while [each.kind for each in differences(served)] != ["amount"]:
        assert time.monotonic() < deadline, differences(served)
        time.sleep(0.02)
    assert differences(served)[0].request_ids == (request_id,)
    with served.services.database.transaction() as session:
        _forget(session, request_id)


def _forget(session: object, request_id: str) -> None:
    for name in ("append_only_engine_receipts_delete",):
        session.execute(text(f"drop trigger if exists {name}"))  # type: ignore[attr-defined]
    query = text("delete from engine_receipts where request_id = :wanted")
    session.execute(query, {"wanted": request_id})  # type: ignore[attr-defined]


async def test_recovery_stores_what_the_engine_kept(tmp_path: Path, database: Database) -> None:
    clock = FakeClock()
    file = SpoolFile(tmp_path / "dead.db")
    file.commit([insert_opened(opened("req_1"))])
    file.close()
    engine = Receipts()
    engine.known["req_1"] = receipt("req_1")
    sink = SqlUsageSink(database, clock)
    own = tmp_path / "own.db"
    rescue = Recovery(tmp_path, own, sink, engine, clock, longest_life_s=60, on_settled=_ignore)
    assert await rescue.round() == 1
    with database.read() as session:
        stored = session.execute(text("select request_id, engine_id from engine_receipts")).all()
        assert [tuple(row) for row in stored] == [("req_1", "engine")]
        assert reconcile.row_differences(session, EVERYTHING) == []


async def test_receipts_of_guards_are_not_kept_and_acknowledged_once_durable(
    tmp_path: Path,
) -> None:
    spool = Spool(SpoolFile(tmp_path / "a.db"))
    spool.bind(asyncio.get_running_loop())
    log, told = ReceiptLog(spool, FakeClock()), []
    guard = receipt("req_g")
    object.__setattr__(guard, "namespace", GUARD_NAMESPACE)
    log.arrived("left", guard, lambda: told.append("guard"))
    log.arrived("left", receipt("req_1"), lambda: told.append("stray"))
    log.arrived("right", receipt("req_1"))
    assert told == ["guard"], "the engine keeps the receipt until it is on the disk"
    spool.flush()
    assert told == ["guard", "stray"]
    left = as_if_killed(spool.file, tmp_path / "left")
    kept = decode_outbox(read_outbox(left.connection, 10)).receipts
    left.close()
    assert [(each.request_id, each.engine_id, each.generated_tokens) for each in kept] == [
        ("req_1", "left", 7),
        ("req_1", "right", 7),
    ]
    spool.file.close()
