"""The files of docs/production.md, as they stand there but for addresses, ports and paths: settings and
commands exist, units are valid, and a stream arrives piece by piece through nginx and HAProxy."""

import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from core.settings import setting_names
from tests.deploy.test_deploy import check_command
from tests.gateway.deployment import running_deployment
from tests.gateway.fake_upstream import upstream
from tests.journeys.deployments import ROOT, free_port

PAGE = (ROOT / "docs/production.md").read_text()
PROXIES = ("nginx", "haproxy")
MODEL = "tiny"
CHAT = "/v1/chat/completions"
LIMIT_S = 60


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


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


def answers(url: str, verify: ssl.SSLContext | bool = True) -> bool:
    try:
        return httpx.get(url, timeout=10, verify=verify).status_code == 200
    except httpx.HTTPError:
        return False


class Held(list[bytes]):
    """The reads of a stream: the second one comes when the client has the first."""

    def __init__(self, reads: list[bytes]) -> None:
        super().__init__(reads)
        self.go = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        for number, each in enumerate(super().__iter__()):
            if number == 1:
                assert self.go.wait(LIMIT_S)
            yield each


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


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


def _proxy(name: str, home: Path, port: int, gateway: str) -> list[str]:
    """Its command, once its file of the page is written."""
    [text] = blocks(name)
    text = re.sub(r"10\.0\.0\.1[12]:8000", gateway.removeprefix("http://"), text)
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


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_stream_arrives_piece_by_piece(tmp_path: Path, proxy: str) -> None:
    """The model goes on when the client has the beginning."""
    if shutil.which(proxy) is None:
        pytest.skip(f"{proxy} is not installed: apt-get install nginx-light haproxy")
    held = Held([event("first "), event("second "), event("", "stop") + b"data: [DONE]\n\n"])
    seen = ""
    with upstream() as model:
        model.answers[CHAT] = held
        settings = {
            "upstreams": json.dumps([{"url": model.url, "model": MODEL}]),
            "trusted_proxies": "127.0.0.0/8",
        }
        with running_deployment(tmp_path / "data", engines=None, settings=settings) as gateway:
            _certificate(tmp_path)
            trust = ssl.create_default_context(cafile=str(tmp_path / "fullchain.pem"))
            trust.check_hostname = False
            port = free_port()
            url = f"https://127.0.0.1:{port}"
            with _running(_proxy(proxy, tmp_path, port, gateway.url)):
                deadline = time.monotonic() + LIMIT_S
                while not answers(f"{url}/readyz", trust):
                    assert time.monotonic() < deadline, f"{proxy} does not answer"
                    time.sleep(0.2)
                body = {"model": MODEL, "messages": [{"role": "user", "content": "Go"}]}
                with httpx.stream(
                    "POST", f"{url}{CHAT}", headers=gateway.headers, verify=trust,
                    json=body | {"stream": True}, timeout=LIMIT_S,
                ) as answer:  # fmt: skip
                    for line in answer.iter_lines():
                        if "first" in line:
                            held.go.set()
                        seen += line
    assert held.go.is_set() and "second" in seen and "[DONE]" in seen, seen
