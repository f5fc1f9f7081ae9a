"""Files and batches on both databases: pieces, leases, and each line counted once."""

from datetime import timedelta

import pytest

from core.batches import files, jobs
from core.batches.models import Batch
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest, Conflict, NotFound, PayloadTooLarge
from core.tenants.scope import TenantScope, scope_of_key

MINE = scope_of_key("org_a", "proj_a", "key_a", "developer")
OTHERS = [
    scope_of_key("org_a", "proj_b", "key_b", "owner"),
    scope_of_key("org_b", "proj_a", "key_a", "owner"),
]


def store(database: Database, clock: FakeClock, content: bytes, **more: int) -> str:
    with database.transaction() as session:
        return files.store(
            session,
            clock,
            tenant_id=MINE.tenant_id,
            project_id="proj_a",
            key_id="key_a",
            filename="in.jsonl",
            purpose="batch",
            content=[content[at : at + 1000] for at in range(0, len(content), 1000)],
            **more,  # type: ignore[arg-type]
        ).id


def batch(database: Database, clock: FakeClock, lines: int = 3) -> str:
    file_id = store(database, clock, b"x")
    with database.transaction() as session:
        made = jobs.create(
            session,
            MINE,
            clock,
            project_id="proj_a",
            endpoint="/v1/chat/completions",
            input_file_id=file_id,
            labels={},
        )
        named = ((f"n{i}", "{}") for i in range(lines))
        jobs.start(session, made, named, "m", clock.now())
        return made.id


def claim(database: Database, clock: FakeClock, owner: str) -> Batch | None:
    with database.transaction() as session:
        return jobs.claim(session, owner, clock.now(), [])


def test_a_file_comes_back_as_it_went_in(database: Database, clock: FakeClock) -> None:
    content = b"".join(b"line %d\n" % i for i in range(300_000)) + b"last"
    assert len(content) > 2 * files.CHUNK_BYTES
    file_id = store(database, clock, content)
    with database.read() as session:
        file = files.get(session, MINE, file_id, clock.now())
        assert file.bytes == len(content)
        assert b"".join(files.content(session, file)) == content
        assert list(files.lines(session, file, 1 << 20)) == content.split(b"\n")


def test_a_file_ends_with_its_life_and_is_only_its_projects(
    database: Database, clock: FakeClock
) -> None:
    file_id = store(database, clock, b"x", lifetime_s=60)
    with database.transaction() as session:
        for scope in OTHERS:
            with pytest.raises(NotFound):
                files.get(session, scope, file_id, clock.now())
            assert files.all_of(session, scope, clock.now()) == []
        clock.advance(61)
        with pytest.raises(NotFound):
            files.get(session, MINE, file_id, clock.now())
        assert files.all_of(session, MINE, clock.now()) == []
        assert files.drop_expired(session, clock.now()) == 1
        assert files.drop_expired(session, clock.now()) == 0


def test_a_file_past_the_bound_leaves_nothing(database: Database, clock: FakeClock) -> None:
    with pytest.raises(PayloadTooLarge):
        store(database, clock, b"x" * (3 << 20), max_bytes=2 << 20)
    with database.read() as session:
        assert files.all_of(session, MINE, clock.now()) == []


def test_one_process_holds_a_batch_and_another_takes_it_when_that_dies(
    database: Database, clock: FakeClock
) -> None:
    batch_id = batch(database, clock)
    taken = claim(database, clock, "one")
    assert taken is not None and taken.id == batch_id
    assert claim(database, clock, "two") is None
    clock.advance(jobs.LEASE_S - 1)
    with database.transaction() as session:
        assert jobs.renew(session, batch_id, "one", clock.now()) is not None
    clock.advance(jobs.LEASE_S - 1)
    assert claim(database, clock, "two") is None
    clock.advance(2)
    again = claim(database, clock, "two")
    assert again is not None and again.id == batch_id
    with database.transaction() as session:
        assert jobs.renew(session, batch_id, "one", clock.now()) is None
        jobs.release(session, batch_id, "one")  # not its own any more: changes nothing
    assert claim(database, clock, "one") is None


def test_each_line_counts_once(database: Database, clock: FakeClock) -> None:
    batch_id = batch(database, clock)
    right = jobs.LineResult(0, True, '{"a": 1}', 5, 2, 3)
    wrong = jobs.LineResult(1, False, '{"b": 2}')
    with database.transaction() as session:
        made = session.get_one(Batch, batch_id)
        jobs.record_results(session, made, [right, right, wrong])
        jobs.record_results(session, made, [right, jobs.LineResult(1, True, "{}", 9, 9, 9)])
        assert (made.total, made.completed, made.failed) == (3, 1, 1)
        assert (made.input_tokens, made.cached_tokens, made.output_tokens) == (5, 2, 3)
        assert [line.number for line in jobs.waiting_lines(session, batch_id, 9)] == [2]
        assert [line.number for line in jobs.waiting_lines(session, batch_id, 9, skip=[2])] == []
        assert b"".join(jobs.result_chunks(session, batch_id, [jobs.DONE])) == b'{"a": 1}\n'
        assert b"".join(jobs.result_chunks(session, batch_id, [jobs.FAILED])) == b'{"b": 2}\n'


def test_cancelling(database: Database, clock: FakeClock) -> None:
    batch_id = batch(database, clock)
    with database.transaction() as session:
        for scope in OTHERS:
            with pytest.raises(NotFound):
                jobs.cancel(session, scope, clock, batch_id)
        assert jobs.cancel(session, MINE, clock, batch_id).status == "cancelling"
        assert jobs.cancel(session, MINE, clock, batch_id).status == "cancelling"
        session.get_one(Batch, batch_id).status = "completed"
        with pytest.raises(Conflict):
            jobs.cancel(session, MINE, clock, batch_id)


def test_bounds_of_a_tenant(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_OPEN", 2)
    monkeypatch.setattr(files, "MAX_FILES", 3)
    batch(database, clock)
    batch(database, clock)
    with pytest.raises(BadRequest) as told:
        batch(database, clock)
    assert told.value.code == "too_many_batches"
    with pytest.raises(BadRequest) as told:
        store(database, clock, b"x")
    assert told.value.code == "too_many_files"


@pytest.mark.parametrize("purpose", ["batch_output"])
def test_a_result_is_no_input(database: Database, clock: FakeClock, purpose: str) -> None:
    file_id = store(database, clock, b"x")
    with database.transaction() as session:
        files.get(session, MINE, file_id, clock.now()).purpose = purpose
        with pytest.raises(BadRequest, match="batch_output"):
            jobs.create(
                session,
                MINE,
                clock,
                project_id="proj_a",
                endpoint="/v1/completions",
                input_file_id=file_id,
                labels={},
            )


def test_the_window_is_a_day(database: Database, clock: FakeClock) -> None:
    batch_id = batch(database, clock)
    with database.read() as session:
        made = jobs.get(session, MINE, batch_id)
        assert made.expires_at - made.created_at == timedelta(hours=24)
        assert isinstance(MINE, TenantScope)
