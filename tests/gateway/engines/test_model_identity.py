"""One public name is one model: an engine that serves another gets no requests, and says why."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from core.clock import SystemClock
from core.errors import Unavailable
from core.settings import Settings
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.protocol import EngineInfo, EngineStats
from engine.runners.cpu.runner import load_runner
from engine.runners.fake import FakeRunner
from engine.worker import wire
from engine.worker.server import Server
from gateway.catalog.upstreams import read_upstreams
from gateway.cli.doctor import dependencies
from gateway.cli.doctor.check import Health
from gateway.engines.clients import make_engines
from gateway.engines.model_identity import Entry, ModelIdentity
from gateway.request.engine import EngineClient
from tests.contracts.test_engine_client import job

NAME = "tollhouse-demo"


def config() -> EngineConfig:
    return EngineConfig(
        model=str(MODEL_DIR), num_blocks=64, max_batch_tokens=64, threads=1, listen="tcp://127.0.0.1:0"
    )  # fmt: skip


@contextmanager
def serving(server: Server) -> Iterator[str]:
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server.address
    server.stop(0.0)
    thread.join(30)


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with serving(Server(config(), load_runner(config()))) as address:
        yield address


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """An engine of other weights, which says that it has another tokenizer."""
    runner = FakeRunner(config())
    runner.info = replace(runner.info, model="other", tokenizer_digest="1" * 64)
    with serving(Server(config(), runner)) as address:
        yield address


@pytest.fixture(scope="module")
def same_tokenizer() -> Iterator[str]:
    """An engine of other weights with the model's tokenizer."""
    with serving(Server(config(), FakeRunner(config()))) as address:
        yield address


@pytest.fixture(scope="module")
def no_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine of real weights whose directory has no tokenizer file."""
    bare = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((MODEL_DIR / name).read_bytes())
    settings = replace(config(), model=str(bare))
    with serving(Server(settings, load_runner(settings))) as address:
        yield address


async def connected(tmp_path: Path, *addresses: str, setting: str = "") -> list[EngineClient]:
    upstreams = read_upstreams(setting or " ".join(addresses))
    made = make_engines(Settings(data_dir=tmp_path), upstreams, lambda *_: None, lambda *_: None)
    clients = [each for listed in made.clients.values() for each in listed]
    for client in clients:
        await client.start()
        async with asyncio.timeout(60):
            while client.info() is None:
                await asyncio.sleep(0.02)
        client.healthy()
    return clients


async def closed(clients: list[EngineClient]) -> None:
    for client in clients:
        await client.close()


async def test_the_engine_of_the_gateways_model_is_served(tmp_path: Path, demo: str) -> None:
    clients = await connected(tmp_path, demo)
    assert clients[0].healthy() and clients[0].refusal == ""
    await closed(clients)


async def test_an_engine_with_another_tokenizer_gets_no_request(tmp_path: Path, other: str) -> None:
    clients = await connected(tmp_path, other)
    assert not clients[0].healthy()
    assert "serves other with another tokenizer" in clients[0].refusal
    assert "TOLLHOUSE_MODEL" in clients[0].refusal
    with pytest.raises(Unavailable):
        await clients[0].generate(job("req_1"))
    await closed(clients)


async def test_an_engine_without_a_tokenizer_is_served_only_where_the_entry_names_one(
    tmp_path: Path, no_tokenizer: str
) -> None:
    clients = await connected(tmp_path, no_tokenizer)
    info = clients[0].info()
    assert info is not None and info.tokenizer_digest == ""
    assert not clients[0].healthy()
    assert "without a tokenizer" in clients[0].refusal and "`tokenizer`" in clients[0].refusal
    await closed(clients)
    entry = f'[{{"url": "{no_tokenizer}", "tokenizer": "{MODEL_DIR}"}}]'
    clients = await connected(tmp_path, setting=entry)
    assert clients[0].healthy() and clients[0].refusal == ""
    await closed(clients)


def test_a_named_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    info = EngineInfo("e", "m", "a" * 64, 1, 1000, 1, 1, (), "float32", 0, "")
    identity = ModelIdentity(NAME, "1" * 64, 1001)
    named = Entry(names_tokenizer=True)
    assert "has 1000 token ids" in identity.refusal("one", info, named)
    assert identity.refusal("one", replace(info, vocab_size=1001), named) == ""
    other = replace(info, vocab_size=1001, tokenizer_digest="2" * 64)
    assert "another tokenizer" in identity.refusal("one", other, named)


def test_an_engine_that_leaves_its_tokenizer_out_is_not_understood() -> None:
    info = EngineInfo("e", "m", "a" * 64, 1, 1, 1, 1, (), "float32", 0, "1" * 64)
    welcome = wire.Welcome(info, EngineStats(0, 0, 1, 1, 0), [], [], 1)
    fields = msgspec.msgpack.decode(wire.encode(welcome)[9:])
    del fields["info"]["tokenizer_digest"]
    without = wire.encode(welcome)[:9] + msgspec.msgpack.encode(fields)
    with pytest.raises(wire.WireError, match="tokenizer_digest"):
        wire.decode(without)


async def test_other_weights_under_one_name_are_refused_unless_they_are_a_canary(
    tmp_path: Path, demo: str, same_tokenizer: str
) -> None:
    clients = await connected(tmp_path, demo, same_tokenizer)
    assert [each.healthy() for each in clients] == [True, False]
    assert "other weights" in clients[1].refusal and "canary_percent" in clients[1].refusal
    await closed(clients)
    entries = f'[{{"url": "{demo}"}}, {{"url": "{same_tokenizer}", "canary_percent": 5}}]'
    clients = await connected(tmp_path, setting=entries)
    assert [each.healthy() for each in clients] == [True, True]
    await closed(clients)


def test_another_version_takes_the_name_when_all_engines_of_the_old_one_have_left() -> None:
    info = EngineInfo("e", "m", "a" * 64, 1, 1, 1, 1, (), "float32", 0, "")
    old, new = info, replace(info, base_digest="b" * 64)
    identity = ModelIdentity(NAME)
    assert identity.refusal("one", old) == identity.refusal("two", old) == ""
    identity.left("one")
    assert "under the name" in identity.refusal("one", new)
    identity.left("two")
    assert identity.refusal("one", new) == ""
    assert "under the name" in identity.refusal("two", old)


def test_the_doctor_compares_what_engines_serve(tmp_path: Path, demo: str, other: str) -> None:
    def _found(*addresses: str) -> dependencies.Finding:
        settings = Settings(data_dir=tmp_path, upstreams=" ".join(addresses))
        return dependencies.upstreams(settings, SystemClock())

    assert _found(demo).health is Health.GOOD
    wrong = _found(demo, other)
    assert wrong.health is Health.BAD and "another tokenizer" in wrong.says
