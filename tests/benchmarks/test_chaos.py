"""The fire that the chaos benchmark makes: its proxy and plan, and two rounds on a whole deployment."""

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from benchmarks.chaos import is_bad, play
from benchmarks.chaos_site.faults import KINDS, Fault, plan
from benchmarks.chaos_site.proxy import Proxy
from benchmarks.chaos_site.servers import Postgres, postgres_programs
from benchmarks.chaos_site.site import site_in
from tests.conftest import need_postgres, need_rabbitmq

PROTECTS = (
    "gateway/metering",
    "gateway/admission",
    "core/celery_queue.py",
    "billing/usage",
    "billing/rating",
    "billing/ledger",
)


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def _serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_echo, args=(link,), daemon=True).start()

    def _echo(link: socket.socket) -> None:
        with link:
            try:
                while data := link.recv(4096):
                    link.sendall(data)
            except OSError:
                return

    threading.Thread(target=_serve, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def asked(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        link.sendall(b"hello")
        return link.recv(100)


def ended(link: socket.socket) -> bool:
    try:
        return link.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_proxy_cuts_stalls_and_refuses_and_heals(echo: tuple[str, int]) -> None:
    with Proxy(*echo) as proxy:
        assert asked(proxy.port) == b"hello"
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as link:
            link.sendall(b"one")
            assert link.recv(100) == b"one"
            proxy.stall()
            link.settimeout(0.3)
            link.sendall(b"two")
            with pytest.raises(TimeoutError):
                link.recv(100)
            proxy.up()
            link.settimeout(5)
            assert link.recv(100) == b"two", "late, and whole"
            proxy.cut()
            assert ended(link)
        assert asked(proxy.port) == b"hello", "a cut lets new connections through"
        proxy.down()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as link:
            assert ended(link)
        proxy.up()
        assert asked(proxy.port) == b"hello"


def test_a_plan_follows_from_seed_and_number_and_misses_no_kind() -> None:
    assert plan(3, 7) == plan(3, 7) != plan(3, 8)
    struck = {(fault.act, fault.part) for number in range(50) for fault in plan(1, number)}
    assert struck == set(KINDS)


def test_a_plan_begins_with_the_kinds_that_are_asked_for() -> None:
    wanted = {("kill", "postgres"), ("kill", "redis"), ("kill", "rabbitmq")}
    plans = [plan(2, number, "kill (postgres|redis|rabbitmq)") for number in range(3)]
    assert wanted <= {(fault.act, fault.part) for faults in plans for fault in faults}


def test_what_a_killed_postgresql_has_committed_is_there_when_it_comes_back() -> None:
    if postgres_programs() is None:
        pytest.skip("PostgreSQL's programs are not installed here: apt-get install postgresql")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # it may run as another user
        own = Path(folder) / "postgres"
        own.mkdir()
        server = Postgres(own)
        try:
            server.start()
            with psycopg.connect(server.address) as link:
                link.execute("create table kept (number integer)")
                link.execute("insert into kept values (7)")
            server.kill()
            assert not server.answers()
            server.start()
            with psycopg.connect(server.address) as link:
                assert link.execute("select number from kept").fetchall() == [(7,)]
        finally:
            server.stop()


def test_an_outage_lasts_long_in_one_round_of_ten() -> None:
    longest = [max(fault.for_s for fault in plan(1, number, "", 60.0)) for number in range(20)]
    assert [number for number, for_s in enumerate(longest) if for_s > 2] == [9, 19]
    assert max(longest) <= 60 and "outage database for 60.0 s" in str(
        Fault(1.0, "outage", "database", 60.0)
    )


@pytest.mark.proof
@pytest.mark.timeout(240)
def test_a_fire_in_all_parts_at_once_loses_and_doubles_nothing(tmp_path: Path) -> None:
    need_postgres()
    need_rabbitmq()
    faults = [
        Fault(0.2, "fill", "spool"),
        Fault(0.4, "stall", "database"),
        Fault(0.6, "kill", "engine0"),
        Fault(0.7, "kill", "worker0"),
        Fault(0.8, "cut", "queue"),
        Fault(1.0, "kill", "redis"),
        Fault(1.4, "kill", "gateway0"),
    ]
    with site_in(tmp_path) as site:
        row = play(site, faults)
    assert not is_bad(row), row
    assert row["broken"], "the gateway died under its clients"
    assert row["events"] > 0 and row["recovery_seconds"] > 0
