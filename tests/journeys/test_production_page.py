"""The files of docs/production.md, as they stand there but for addresses, ports and paths: two gateways
behind nginx and HAProxy. Streams arrive piece by piece, and a rolling restart drops no answer."""

import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.settings import setting_names
from tests.conftest import RABBITMQ, REDIS, need_rabbitmq, need_redis
from tests.deploy.test_deploy import check_command
from tests.gateway.fake_upstream import Server, upstream
from tests.journeys.deployments import ROOT, free_port

PAGE = (ROOT / "docs/production.md").read_text()
PROXIES = ("nginx", "haproxy")
MODEL = "base"
CHAT = "/v1/chat/completions"
LIMIT_S = 60


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def settings_of_the_page() -> dict[str, str]:
    [text] = [each for each in blocks("") if each.startswith("TOLLHOUSE_")]
    return dict(line.split("=", 1) for line in text.splitlines())


def test_settings_and_commands_of_the_page_exist() -> None:
    assert {*settings_of_the_page()} <= {*setting_names()}
    lines = [line for block in blocks("") for line in block.splitlines()]
    started = [line for unit in blocks("ini") for line in re.findall("ExecStart=(.*)", unit)]
    commands = [line for line in [*lines, *started] if "tollhouse " in line.partition("=")[0]]
    commands += [line for line in started if line not in commands]
    assert len(commands) == 6
    for line in commands:
        check_command(shlex.split(line)[1:])


def test_the_units_are_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing; install systemd to verify the units")
    for number, unit in enumerate(blocks("ini")):
        file = tmp_path / f"tollhouse-{number}.service"
        file.write_text(unit.replace("/opt/tollhouse/bin/tollhouse", sys.executable))
        verified = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)],
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        about = [line for line in verified.stderr.splitlines() if file.name in line]
        assert not about, verified.stderr
        stop = int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
        if " serve" in unit:
            given = settings_of_the_page()
            drain = [int(given[f"TOLLHOUSE_DRAIN_{name}_S"]) for name in ("DELAY", "TIMEOUT")]
            assert stop > sum(drain)


@dataclass
class Gateway:
    """A gateway that can be restarted at its address."""

    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.environment['TOLLHOUSE_PORT']}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli.main", "serve"],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.DEVNULL,
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 2 * LIMIT_S
        while not answers(f"{self.url}/readyz"):
            assert self.process is not None and self.process.poll() is None, "the gateway ended"
            assert time.monotonic() < deadline, "the gateway is not ready"
            time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(2 * LIMIT_S) == 0
            self.process = None


def answers(url: str, verify: ssl.SSLContext | bool = True) -> bool:
    try:
        return httpx.get(url, timeout=10, verify=verify).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Site:
    gateways: list[Gateway]
    urls: dict[str, str]  # of each proxy
    key: str
    trust: ssl.SSLContext
    model: Server

    def client(self, proxy: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(
            base_url=self.urls[proxy], headers=headers, verify=self.trust, timeout=LIMIT_S
        )


class Held(list[bytes]):
    """The reads of a stream, each after the first one when the client has what came before."""

    def __init__(self, reads: list[bytes]) -> None:
        super().__init__(reads)
        self.go = [threading.Event() for _ in reads[1:]]

    def __iter__(self) -> Iterator[bytes]:
        for number, each in enumerate(super().__iter__()):
            if number:
                assert self.go[number - 1].wait(LIMIT_S)
            yield each


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def whole(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Go"}], **more}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, module_postgres_url: str) -> Iterator[Site]:
    need_redis()
    need_rabbitmq()
    if missing := [name for name in PROXIES if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed: apt-get install nginx-light haproxy")
    home = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        model = stack.enter_context(upstream())
        model.answers[CHAT] = whole
        gateways = [
            Gateway(_environment(home / f"gateway-{n}", module_postgres_url, model.url))
            for n in (1, 2)
        ]
        key = _first_key(gateways[0].environment)
        for each in gateways:
            stack.callback(each.stop)
            each.start()
        for each in gateways:
            each.wait_ready()
        _certificate(home)
        trust = ssl.create_default_context(cafile=str(home / "fullchain.pem"))
        trust.check_hostname = False
        urls = {}
        for proxy in PROXIES:
            port = free_port()
            urls[proxy] = f"https://127.0.0.1:{port}"
            stack.enter_context(_running(_proxy(proxy, home, port, gateways)))
            deadline = time.monotonic() + LIMIT_S
            while not answers(f"{urls[proxy]}/readyz", trust):
                assert time.monotonic() < deadline, f"{proxy} does not answer"
                time.sleep(0.2)
        yield Site(gateways, urls, key, trust, model)


def _environment(data: Path, database: str, model: str) -> dict[str, str]:
    """The settings of the page, with this machine's addresses."""
    data.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    own = {
        "TOLLHOUSE_DATABASE_URL": database,
        "TOLLHOUSE_REDIS_URL": REDIS,
        "TOLLHOUSE_BROKER_URL": RABBITMQ,
        "TOLLHOUSE_UPSTREAMS": json.dumps([{"url": model, "model": MODEL}]),
        "TOLLHOUSE_MODEL": "",
        "TOLLHOUSE_HOST": "127.0.0.1",
        "TOLLHOUSE_PORT": str(free_port()),
        "TOLLHOUSE_DATA_DIR": str(data),
        "TOLLHOUSE_TRUSTED_PROXIES": "127.0.0.0/8",
        "TOLLHOUSE_METRICS_LISTEN": f"127.0.0.1:{free_port()}",
    }
    return kept | settings_of_the_page() | own


def _first_key(environment: dict[str, str]) -> str:
    [block] = [each for each in blocks("") if each.startswith("tollhouse migrate")]
    made = ""
    for line in block.splitlines()[:2]:
        words = shlex.split(line)[1:] + (["--json"] if "--key" in line else [])
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli.main", *words],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3 * LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made = done.stdout
    return re.findall(r'"(sk-[^"]+|th[^"]*_[^"]{20,})"', made)[0]


def _certificate(home: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=llm.example.com", "-addext", "subjectAltName=DNS:llm.example.com"),
            *("-keyout", str(home / "key.pem"), "-out", str(home / "fullchain.pem")),
        ],
        check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    both = (home / "fullchain.pem").read_text() + (home / "key.pem").read_text()
    (home / "haproxy.pem").write_text(both)


def _proxy(name: str, home: Path, port: int, gateways: list[Gateway]) -> list[str]:
    """Its command, once its file of the page is written."""
    [text] = blocks(name)
    for number, each in enumerate(gateways, 11):
        text = text.replace(f"10.0.0.{number}:8000", each.url.removeprefix("http://"))
    text = text.replace("/etc/ssl/tollhouse", str(home))
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("bind :443", f"bind 127.0.0.1:{port}")
    file = home / f"{name}.conf"
    if name == "haproxy":
        file.write_text(text)
        return ["haproxy", "-db", "-f", str(file)]
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{each}_temp_path {home}/{each};\n" for each in names)
    user = "user root;" if os.geteuid() == 0 else ""
    file.write_text(
        f"{user} daemon off; pid {home}/nginx.pid; error_log {home}/nginx.log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{folders}{text}}}\n"
    )
    return ["nginx", "-e", f"{home}/nginx.log", "-c", str(file)]


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.mark.proof
@pytest.mark.parametrize("proxy", PROXIES)
def test_a_stream_arrives_piece_by_piece(site: Site, proxy: str) -> None:
    """The model says the next word when the client has the one before."""
    words = [f"word{n} " for n in range(5)]
    held = Held([*map(event, words), event("", "stop") + b"data: [DONE]\n\n"])
    site.model.answers[CHAT] = lambda body: held
    seen = 0
    try:
        with (
            site.client(proxy) as client,
            client.stream("POST", CHAT, json=asked(stream=True)) as answer,
        ):
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if seen < len(words) and words[seen].strip() in line:
                    held.go[seen].set()
                    seen += 1
    finally:
        site.model.answers[CHAT] = whole
        for each in held.go:
            each.set()
    assert seen == len(words)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_rolling_restart_drops_no_answer(site: Site) -> None:
    stop = threading.Event()
    done: dict[str, list[str]] = {proxy: [] for proxy in PROXIES}

    def _ask(proxy: str) -> None:
        with site.client(proxy) as client:
            while not stop.is_set():
                try:
                    answer = client.post(CHAT, json=asked())
                    done[proxy].append(
                        f"{answer.status_code} {answer.text[:200] if answer.status_code != 200 else ''}"
                    )
                except httpx.HTTPError as error:
                    done[proxy].append(repr(error))
                time.sleep(0.02)

    clients = [threading.Thread(target=_ask, args=(proxy,)) for proxy in PROXIES * 2]
    for each in clients:
        each.start()
    try:
        for gateway in site.gateways:
            gateway.stop()
            gateway.start()
            gateway.wait_ready()
    finally:
        stop.set()
        for each in clients:
            each.join()
    for proxy, statuses in done.items():
        assert len(statuses) > 50, proxy
        assert {*statuses} == {"200 "}, (proxy, [each for each in statuses if each != "200 "])
