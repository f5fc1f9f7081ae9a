"""Two gateways are restarted in turn behind the proxies of docs/production.md, under clients that ask
again as soon as they have an answer: how many answers fail.
python -m benchmarks.rolling_restart [--answers 10000] [--proxy nginx haproxy]

nginx and HAProxy run with the files of the page, but for addresses and paths. Whole answers and streams
come in turns; one fails that has another status than 200, or an end that is missing. The model is a
server in this process that takes its time.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from aiohttp import web

from benchmarks.report import figure, progress

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/production.md"
PROXIES = ("nginx", "haproxy")
MODEL = "slow"
CLIENTS = 12
_PIECES, _PIECE_S = 4, 0.02
_STARTS_S, _STOPS_S, _ANSWERS_S = 120.0, 90.0, 60.0
_SETTLES_S = 3.0  # a proxy asks each second whether a gateway is back
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass
class Load:
    """What clients got. `wanted` answers end it, once every gateway was restarted."""

    wanted: int
    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    restarts_done: bool = False

    @property
    def goes_on(self) -> bool:
        return self.answers < self.wanted or not self.restarts_done


async def _answer(request: web.Request) -> web.StreamResponse:
    """A model that takes its time, whole or piece by piece."""
    asked = await request.json()
    if not asked.get("stream"):
        await asyncio.sleep(_PIECES * _PIECE_S)
        message = {"role": "assistant", "content": "word " * _PIECES}
        usage = {"prompt_tokens": 3, "completion_tokens": _PIECES}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for number in range(_PIECES):
        await asyncio.sleep(_PIECE_S)
        reason = "stop" if number == _PIECES - 1 else None
        choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": reason}
        await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    await answer.write(b"data: [DONE]\n\n")
    return answer


class Gateway:
    """`tollhouse serve` with a data directory and a port of its own."""

    def __init__(self, home: Path, name: str, upstream: str) -> None:
        self.port = _free_port()
        self.folder = home / name
        self.folder.mkdir()
        kept = {name: it for name, it in os.environ.items() if not name.startswith("TOLLHOUSE_")}
        self._environment = kept | {
            "TOLLHOUSE_DATA_DIR": str(self.folder),
            "TOLLHOUSE_DATABASE_URL": f"sqlite:///{home / 'tollhouse.db'}",
            "TOLLHOUSE_DEMO_TENANT": "always",
            "TOLLHOUSE_UPSTREAMS": json.dumps([{"url": upstream, "model": MODEL}]),
            "TOLLHOUSE_TRUSTED_PROXIES": "127.0.0.0/8",
            "TOLLHOUSE_DRAIN_DELAY_S": "5",
            "TOLLHOUSE_DRAIN_TIMEOUT_S": "30",
            "TOLLHOUSE_ADMIN_TOKEN": "a-long-token-of-this-benchmark",
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.cli.main", "serve", "--port", str(self.port)),
                cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(_STARTS_S):
            line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a gateway did not start: see {self.folder / 'log'}")

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(_STOPS_S):
            await self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _make_certificate(home: Path) -> None:
    made = ("-keyout", str(home / "key.pem"), "-out", str(home / "fullchain.pem"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=llm.example.com", *made),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    both = (home / "fullchain.pem").read_text() + (home / "key.pem").read_text()
    (home / "haproxy.pem").write_text(both)


def proxy_command(name: str, home: Path, port: int, gateways: list[int]) -> list[str]:
    """Its command, once its file of the page is written."""
    [text] = re.findall(rf"```{name}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for number, gateway in enumerate(gateways, 1):
        text = text.replace(f"10.0.0.1{number}:8000", f"127.0.0.1:{gateway}")
    text = text.replace("/etc/ssl/tollhouse", str(home))
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("bind :443", f"bind 127.0.0.1:{port}")
    file = home / f"{name}.conf"
    if name == "haproxy":
        file.write_text(text)
        return ["haproxy", "-db", "-f", str(file)]
    folders = "".join(f"{each}_temp_path {home}/{each};\n" for each in _TEMPORARY)
    user = "user root;" if os.geteuid() == 0 else ""
    file.write_text(
        f"{user} daemon off; pid {home}/nginx.pid; error_log {home}/nginx.log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{folders}{text}}}\n"
    )
    return ["nginx", "-e", f"{home}/nginx.log", "-c", str(file)]


@contextmanager
def _proxy(name: str, home: Path, gateways: list[int]) -> Iterator[str]:
    port = _free_port()
    with (home / f"{name}.out").open("ab") as log:
        process = subprocess.Popen(
            proxy_command(name, home, port, gateways), stdout=log, stderr=log
        )
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


async def _client(session: aiohttp.ClientSession, url: str, load: Load) -> None:
    messages = [{"role": "user", "content": "Go"}]
    while load.goes_on:
        streams = load.answers % 2 == 0
        body = {"model": MODEL, "messages": messages, "stream": streams}
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                text = await answer.text()
                whole = text.rstrip().endswith("data: [DONE]") if streams else "choices" in text
                if answer.status != 200 or not whole or '"error"' in text:
                    load.failures[f"{answer.status} {text[-120:]}"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            load.failures[f"{type(error).__name__}: {error}"[:150]] += 1
            await asyncio.sleep(0.05)
        load.answers += 1


async def _restart_in_turn(gateways: list[Gateway], load: Load, rounds: int) -> None:
    for number in range(rounds):
        for gateway in gateways:
            await gateway.stop()
            await gateway.start()
            await asyncio.sleep(_SETTLES_S)
            progress(f"round {number + 1}: {load.answers} answers, {load.failures.total()} failed")
    load.restarts_done = True


async def _until_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(_ANSWERS_S):
        while True:
            try:
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


async def measure(proxy: str, answers: int, rounds: int = 2, clients: int = CLIENTS) -> Load:
    """Behind one of the proxies, with `rounds` restarts of each gateway at least."""
    with TemporaryDirectory() as place:
        home, load = Path(place), Load(answers)
        _make_certificate(home)
        trust = ssl.create_default_context(cafile=str(home / "fullchain.pem"))
        trust.check_hostname = False
        application = web.Application()
        application.router.add_post("/v1/chat/completions", _answer)
        runner = web.AppRunner(application)
        await runner.setup()
        model = _free_port()
        await web.TCPSite(runner, "127.0.0.1", model).start()
        gateways = [Gateway(home, name, f"http://127.0.0.1:{model}") for name in ("one", "two")]
        try:
            for gateway in gateways:
                await gateway.start()
            key = (gateways[0].folder / "demo-key").read_text().strip()
            ports = [gateway.port for gateway in gateways]
            async with aiohttp.ClientSession(
                headers={"authorization": f"Bearer {key}"},
                connector=aiohttp.TCPConnector(ssl=trust),
                timeout=aiohttp.ClientTimeout(total=_ANSWERS_S),
            ) as session:
                with _proxy(proxy, home, ports) as url:
                    await _until_ready(session, url)
                    async with asyncio.TaskGroup() as group:
                        for _ in range(clients):
                            group.create_task(_client(session, url, load))
                        group.create_task(_restart_in_turn(gateways, load, rounds))
        finally:
            for gateway in gateways:
                await gateway.stop()
            await runner.cleanup()
        return load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2, help="restarts of each gateway")
    parser.add_argument("--proxy", nargs="*", choices=PROXIES, default=PROXIES)
    arguments = parser.parse_args()
    failed = 0
    for proxy in arguments.proxy:
        if shutil.which(proxy) is None:
            raise SystemExit(f"{proxy} is not installed: apt-get install nginx-light haproxy")
        load = asyncio.run(measure(proxy, arguments.answers, arguments.rounds))
        for words, count in load.failures.most_common(5):
            progress(f"{count} x {words}")
        figure(
            f"rolling restart behind {proxy}: failed answers",
            load.failures.total(),
            "answers",
            False,
            at_least=0,
            aim=0,
            settings={
                "answers": load.answers,
                "clients": CLIENTS,
                "restarts": 2 * arguments.rounds,
            },
        )
        failed += load.failures.total()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
