"""The one set of fixtures: databases that are made for a test and dropped after it."""

import gc
import logging
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import argon2
import hypothesis
import psycopg
import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

from core.clock import FakeClock
from core.database import Database
from core.tenants import passwords
from tests.certificates import read_once
from tests.postgres_copies import Copies
from tests.shared_statements import share

# Without a GPU the kernels run in Triton's interpreter; whatever imports Triton first decides.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Two workers that each use every core spend most of it on waiting for their own threads: a test of the
# demo model took nine times the CPU. Whatever imports torch or numpy first decides here, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nor does a thread of a runner with more of them spin while it waits for the others, which have to wait
# for a core themselves: each product of a tiny model then took four milliseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

for _library in ("httpx", "httpx2"):  # which of them an SDK uses depends on its version
    if not find_spec(_library):
        continue
    # Each `httpx.get`, and each client of an SDK, would read every authority anew: see there.
    _transports = import_module(f"{_library}._transports.default")
    _transports.create_ssl_context = read_once(_transports.create_ssl_context)
    # A time-out that only guards against hanging is a minute; httpx's own are five seconds, for which a
    # busy machine may keep a server in a thread of the tests from running.
    _default = import_module(f"{_library}._config").DEFAULT_TIMEOUT_CONFIG
    for _part in ("connect", "read", "write", "pool"):
        setattr(_default, _part, 60.0)

share()

# A hash of a password takes 64 MiB and a sixth of a second on purpose. One test asks for that cost.
hasher_of_the_product = passwords._hasher
_cheapest = argon2.PasswordHasher.from_parameters(argon2.profiles.CHEAPEST)
passwords._hasher = lambda: _cheapest  # type: ignore[assignment]

# Modules make no garbage worth a search; looking for it was an eighth of the time of the collection.
gc.disable()

# A change is judged by its own merits: the same examples every time. `--hypothesis-profile explore`
# looks for new ones, and keeps what it found in `.hypothesis` until it is mended. Neither has a
# deadline: that a busy machine makes one example slow is no fault of what is tested.
hypothesis.settings.register_profile("tollhouse", deadline=None, derandomize=True)
hypothesis.settings.register_profile(
    "explore",
    deadline=None,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    print_blob=True,
)
hypothesis.settings.load_profile("tollhouse")


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look over it again and again, for seconds
    each time on a slow machine, while a server in a thread waits. Nor does it look for cycles after every
    700 new objects, which took a tenth of the time of a test on money."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: begun last, one would keep one worker while the others idle."""
    slow = {i.path for i in items if i.get_closest_marker("slow") or i.get_closest_marker("proof")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A runner sets the number of torch's threads for the process, and for the tests after its own. So
    does a command with the log, whose stream is that of its test and closed after it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # those of pytest are of other types
            root.removeHandler(handler)
            root.setLevel(logging.WARNING)


POSTGRES = os.environ.get("TOLLHOUSE_TEST_POSTGRES", "postgresql://root@127.0.0.1:5432/postgres")
REDIS = os.environ.get("TOLLHOUSE_TEST_REDIS", "redis://127.0.0.1:6379/0")
RABBITMQ = os.environ.get("TOLLHOUSE_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672")
NATS = os.environ.get("TOLLHOUSE_TEST_NATS", "nats://127.0.0.1:4222")
# Brokers of Kafka, where some answer; else tests use the cluster inside the client library.
KAFKA = os.environ.get("TOLLHOUSE_TEST_KAFKA", "127.0.0.1:9092")
SPECS = Path(os.environ.get("TOLLHOUSE_SPECS_DIR", "../shared/specs"))


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def need_postgres() -> None:
    try:
        psycopg.connect(POSTGRES, connect_timeout=2).close()
    except psycopg.Error as error:
        pytest.skip(
            f"PostgreSQL does not answer at TOLLHOUSE_TEST_POSTGRES ({POSTGRES}): "
            f"{str(error).splitlines()[0]}; start one there to run this test"
        )


def need_redis() -> None:
    if not _answers("127.0.0.1", 6379):
        pytest.skip("Redis does not answer on 127.0.0.1:6379; start one to run this test")


def need_rabbitmq() -> None:
    if not _answers("127.0.0.1", 5672):
        pytest.skip("RabbitMQ does not answer on 127.0.0.1:5672; start one to run this test")


def need_nats() -> None:
    pytest.importorskip("nats")
    if not _answers("127.0.0.1", 4222):
        pytest.skip(
            "NATS does not answer on 127.0.0.1:4222; start nats-server -js to run this test"
        )


def kafka_answers() -> bool:
    host, _, port = KAFKA.partition(",")[0].rpartition(":")
    return _answers(host, int(port))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'tollhouse.db'}"


@contextmanager
def _postgres(template: str = "template1") -> Iterator[str]:
    """The URL of a new database, which is dropped afterwards."""
    need_postgres()
    name = f"tollhouse_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
        admin.execute(f"create database {name} template {template}")
        admin.execute(f"alter database {name} set synchronous_commit = off")
    yield POSTGRES.rpartition("/")[0] + f"/{name}"
    with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as admin:
        admin.execute(f"drop database if exists {name} with (force)")


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A PostgreSQL database of this test's own."""
    with _postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(fixture)
    return url


@pytest.fixture(scope="session")
def migrated_sqlite() -> Path:
    from tests.migrated import migrated_file

    return migrated_file()


@pytest.fixture(scope="session")
def migrated_postgres() -> Iterator[str]:
    """Name of a migrated database that tests take as their template."""
    from tests.migrated import migrated

    with _postgres() as url:
        migrated(url).close()
        yield url.rpartition("/")[2]


@pytest.fixture(scope="session")
def postgres_copies(migrated_postgres: str) -> Iterator[Copies]:
    made = Copies(POSTGRES, migrated_postgres)
    yield made
    made.close()


@pytest.fixture
def postgres_database(postgres_copies: Copies) -> Iterator[Database]:
    """A migrated PostgreSQL database of this test's own."""
    name = postgres_copies.take()
    made = Database(postgres_copies.url(name))
    yield made
    made.close()
    postgres_copies.give_back(name)


@pytest.fixture
def sqlite_database(sqlite_url: str, migrated_sqlite: Path) -> Iterator[Database]:
    """A migrated SQLite database, where the dialect does not matter to the test."""
    shutil.copy(migrated_sqlite, sqlite_url.removeprefix("sqlite:///"))
    made = Database(sqlite_url)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Database:
    """A migrated database, once on SQLite and once on PostgreSQL."""
    fixture = "sqlite_database" if request.param == "sqlite" else "postgres_database"
    made: Database = request.getfixturevalue(fixture)
    return made
