"""What one hostile tenant of the lowest plan makes another one wait, resource by resource.

    python -m benchmarks.neighbours [--only "running places" ...] [--seconds 12]

An embedded instance with its own engine and the demo model, in processes of its own. Of each row of
HOSTILE the attack runs for some seconds, while a victim on the lowest plan asks for a short answer and
reads its account. Figures: the worst wait of the victim's first tokens and of its other routes, and how
many of its calls were refused, for each resource and over all. A new resource is one more row.
"""

import argparse
import asyncio
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gateway_load.own import ROOT
from benchmarks.report import figure, progress
from engine.demo.paths import MODEL_DIR

MODEL = "tollhouse-demo"
PLAN = "free"
FIRST_TOKEN_S = 1.0  # bound of the victim's first tokens
ROUTE_S = 0.5  # bound of its other routes
# The lowest plan admits 20 requests a minute. The victim keeps within it; so that an attack lasts, its
# tenant may repeat what it does, which only makes it stronger.
_VICTIM_EVERY_S = 3.2
_ROUTES = ("/v1/models", "/v1/organization/usage/completions?start_time=1700000000&limit=1")
_ENDPOINTS = 5  # webhooks of the hostile tenant
_TAKEN_S = (
    40.0  # within which a call of an attack is taken; the outbox is looked at each ten seconds
)
_ADAPTER = MODEL_DIR.parent / "adapters" / "pirate"
_numbers = itertools.count()


@dataclass(frozen=True)
class Site:
    url: str
    operator: str

    def tenant(self, name: str) -> str:
        """The key of a new tenant's owner, on the lowest plan."""
        headers = {"authorization": f"Bearer {self.operator}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60) as operator:
            named = f"{name}-{next(_numbers)}"
            made = operator.post("/admin/v1/tenants", json={"name": named, "plan": PLAN})
            made.raise_for_status()
            body = {"project_id": made.json()["project_id"], "name": "k", "role": "owner"}
            key = operator.post("/admin/v1/keys", params={"tenant": named}, json=body)
            key.raise_for_status()
        return str(key.json()["secret"])


@dataclass
class Attack:
    """What a hostile tenant has: a key, and a client without patience."""

    site: Site
    key: str
    client: httpx.AsyncClient
    accepted: int = 0  # calls that were not refused

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response | None:
        with suppress(httpx.HTTPError):
            return await self.client.post(path, json=body, **options)
        return None

    async def act(self, page: str, **fields: str) -> str:
        """The page after an act on the dashboard."""
        path = f"/dashboard/{page}"
        answer = await self.client.post(path, data=fields, follow_redirects=True)
        return answer.text

    async def chat(self, **body: Any) -> httpx.Response | None:
        fields = {
            "model": MODEL,
            "messages": _said(f"Tell me {next(_numbers)}"),
            "ignore_eos": True,
            "stream": True,  # so that one sees that it was taken before it ends
        }
        return await self.post("/v1/chat/completions", fields | body)

    async def unread(self, **body: Any) -> None:
        """A stream of which nothing is read."""
        fields = {
            "model": MODEL,
            "messages": _said("Go on"),
            "ignore_eos": True,
            "stream": True,
        } | body
        data = json.dumps(fields).encode()
        host, _, port = self.site.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        self.accepted += 1
        try:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(600)
        finally:
            writer.close()


Act = Callable[[Attack], Awaitable[object]]


def times(count: int, act: Act) -> Act:
    async def many(attack: Attack) -> None:
        await asyncio.gather(*[act(attack) for _ in range(count)])

    return many


@dataclass(frozen=True)
class Hostile:
    resource: str
    shape: str
    act: Act  # repeated until the row's time is over
    scarce: tuple[tuple[str, str], ...] = ()  # settings that make the resource small


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _new_words(count: int) -> str:
    """Words that no cache knows."""
    return " ".join(str(next(_numbers)) for _ in range(count))


def _schema() -> dict[str, Any]:
    """One that no cache knows, and that takes long to compile."""
    number = next(_numbers)
    nested: dict[str, Any] = {"type": "string", "pattern": f"^(a|b|c{number}){{1,40}}$"}
    for depth in range(6):
        nested = {"type": "object", "properties": {f"p{number}_{depth}_{k}": nested for k in "ab"}}
    return {"type": "json_schema", "json_schema": {"name": f"s{number}", "schema": nested}}


def _archive(size: int) -> bytes:
    held = io.BytesIO()
    config = json.loads((_ADAPTER / "adapter_config.json").read_text()) | {
        "lora_alpha": next(_numbers) + 1
    }
    files = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": (_ADAPTER / "adapter_model.safetensors").read_bytes(),
        "README.md": os.urandom(size),
    }
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=1) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


async def _upload(attack: Attack, size: int = 0) -> str:
    name = f"a{next(_numbers)}"
    files = {"file": ("a.tar.gz", await asyncio.to_thread(_archive, size))}
    data = {"name": name, "base_model": MODEL}
    with suppress(httpx.HTTPError):
        await attack.client.post("/admin/v1/adapters", data=data, files=files)
    return name


async def _use_adapter(attack: Attack) -> None:
    await attack.chat(model=await _upload(attack), max_tokens=400)


async def _keep_file(attack: Attack, size: int = 4 << 20) -> None:
    files = {"file": (f"{next(_numbers)}.jsonl", os.urandom(size))}
    with suppress(httpx.HTTPError):
        await attack.client.post("/v1/files", data={"purpose": "batch"}, files=files)


_ENDLESS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"


async def _idle_socket(attack: Attack, sent: bytes = _ENDLESS) -> None:
    host, _, port = attack.site.url.removeprefix("http://").partition(":")
    with suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(sent)
            attack.accepted += 1
            await asyncio.sleep(600)
        finally:
            writer.close()


async def _unread_export(attack: Attack) -> None:
    request = "POST /admin/v1/tenant/export HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    await _idle_socket(attack, f"{request}Authorization: Bearer {attack.key}\r\n\r\n".encode())


async def _webhook(attack: Attack) -> None:
    """A receiver that takes calls and answers a byte now and then."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attack.accepted += 1
        with suppress(OSError, asyncio.CancelledError):
            while True:
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(5)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        await attack.act("sign-in", secret=attack.key)
        for number in range(_ENDPOINTS):
            url = f"http://127.0.0.1:{port}/{number}"
            page = await attack.act("webhooks", act="add", url=url, events="all")
        endpoints = set(re.findall(r'name="endpoint" value="([^"]+)"', page))
        while True:
            for each in endpoints:
                await attack.act("webhooks", act="test", endpoint=each)
            await asyncio.sleep(0.1)


_SMALL_POOL = (("TOLLHOUSE_KV_MEMORY_MB", "4"),)  # which one of the attack's requests fills

HOSTILE = (
    Hostile("running places", "one request of 64 choices", lambda a: a.chat(n=64, max_tokens=400)),
    Hostile("running places", "requests one by one", times(64, lambda a: a.chat(max_tokens=400))),
    Hostile("running places", "20 candidates of one answer", lambda a: a.post(
        "/v1/completions",
        {"model": MODEL, "prompt": "Say", "max_tokens": 200, "best_of": 20, "n": 1, "ignore_eos": True},
    )),
    Hostile("KV blocks", "long prompts with long answers", times(
        8, lambda a: a.chat(messages=_said("word " * 900), max_tokens=400, n=8)
    ), _SMALL_POOL),
    Hostile("KV blocks", "prompts that fill a step", times(
        2, lambda a: a.chat(messages=_said(_new_words(400)), max_tokens=1)
    ), _SMALL_POOL),
    Hostile("adapter slots", "an adapter a request", times(8, _use_adapter)),
    Hostile("grammar workers", "large schemas", times(8, lambda a: a.chat(
        response_format=_schema(), max_tokens=4, ignore_eos=False
    ))),
    Hostile("gateway threads", "archives that are slow to unpack", times(
        7, lambda a: _upload(a, 4 << 20)
    )),
    Hostile("event loop", "streams that nobody reads", times(5, lambda a: a.unread(
        n=16, max_tokens=400, logprobs=True, top_logprobs=20
    ))),
    Hostile("write lock", "small files", times(16, lambda a: _keep_file(a, 100))),
    Hostile("outbox", "a receiver of a byte in five seconds", _webhook),
    Hostile("database connections", "reports of long spans", times(16, lambda a: a.client.get(
        "/v1/organization/usage/completions?start_time=1500000000&bucket_width=1m&limit=1440"
    ))),
    Hostile("disk bytes", "files", times(4, _keep_file)),
    Hostile("temporary files", "exports that nobody reads", times(8, _unread_export)),
    Hostile("sockets", "requests whose heads never end", times(300, _idle_socket)),
    Hostile("log", "errors", times(16, lambda a: a.post("/v1/chat/completions", {"model": "x" * 900}))),
)  # fmt: skip


@dataclass
class Felt:
    """What the victim felt."""

    first_tokens: list[float] = field(default_factory=list)
    routes: list[float] = field(default_factory=list)
    refused: int = 0
    accepted: int = 0  # calls of the attack, without which the row says nothing


async def suffer(client: httpx.AsyncClient, until: float) -> Felt:
    felt = Felt()
    while time.monotonic() < until:
        began = time.monotonic()
        body = {
            "model": MODEL,
            "messages": _said(f"hi {next(_numbers)}"),
            "max_tokens": 1,
            "stream": True,
        }
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                felt.refused += answer.status_code != 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        break
        except httpx.HTTPError:
            felt.refused += 1
        felt.first_tokens.append(time.monotonic() - began)
        for route in _ROUTES:
            asked = time.monotonic()
            try:
                felt.refused += (await client.get(route)).status_code != 200
            except httpx.HTTPError:
                felt.refused += 1
            felt.routes.append(time.monotonic() - asked)
        await asyncio.sleep(max(0.0, _VICTIM_EVERY_S - (time.monotonic() - began)))
    return felt


async def meet(site: Site, hostile: Hostile, seconds: float) -> Felt:
    """The victim's waits under one attack."""
    async with _client(site, site.tenant("victim")) as victim:
        await suffer(
            victim, time.monotonic() + 0.1
        )  # what only the first request of a tenant takes
        key = site.tenant("hostile")
        async with _client(site, key) as client:
            attack = Attack(site, key, client)

            async def note(answer: httpx.Response) -> None:
                if hostile.resource != "outbox":  # its receiver counts the messages
                    attack.accepted += answer.status_code < 400 or hostile.resource == "log"

            client.event_hooks = {"response": [note]}
            running = asyncio.create_task(_again(hostile.act, attack))
            try:
                await _taken(attack)
                felt = await suffer(victim, time.monotonic() + seconds)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    felt.accepted = attack.accepted
    return felt


async def _taken(attack: Attack) -> None:
    """Once the attack has begun: before, its victim has no neighbour."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_TAKEN_S):
            while not attack.accepted:
                await asyncio.sleep(0.05)


async def _again(act: Act, attack: Attack) -> None:
    while True:
        with suppress(httpx.HTTPError, OSError):
            await act(attack)
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _client(site: Site, key: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=site.url, headers=headers, timeout=120, limits=limits
    ) as client:
        yield client


@contextmanager
def embedded(home: Path, settings: Mapping[str, str]) -> Iterator[Site]:
    kept = {name: each for name, each in os.environ.items() if not name.startswith("TOLLHOUSE_")}
    environment = kept | {
        "TOLLHOUSE_DATA_DIR": str(home),
        "TOLLHOUSE_PORT": "0",
        "TOLLHOUSE_LOG_LEVEL": "error",
        "TOLLHOUSE_WEBHOOK_NETWORKS": "127.0.0.0/8",  # the slow receiver of the outbox's row
        **settings,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli.main", "serve"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the instance did not start")
        yield Site(json.loads(line)["url"], (home / "admin-token").read_text().strip())
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def report(resource: str, felt: list[Felt], settings: dict[str, Any]) -> None:
    first = max((wait for each in felt for wait in each.first_tokens), default=0.0)
    route = max((wait for each in felt for wait in each.routes), default=0.0)
    name = f"neighbours.{resource.replace(' ', '_')}"
    figure(
        f"{name}.first_token", first, "s", False, at_least=FIRST_TOKEN_S, aim=0.3, settings=settings
    )
    figure(f"{name}.routes", route, "s", False, at_least=ROUTE_S, aim=0.1, settings=settings)
    refused = sum(each.refused for each in felt)
    figure(f"{name}.refused", refused, "calls", False, at_least=0, aim=0, settings=settings)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__)
    parser.add_argument("--seconds", type=float, default=16.0, help="of each row")
    parser.add_argument("--only", nargs="*", default=[], help="resources")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - {row.resource for row in HOSTILE}
    if unknown:
        parser.error(f"there is no resource {sorted(unknown)[0]!r}")
    rows = [row for row in HOSTILE if not options.only or row.resource in options.only]
    found: dict[str, list[Felt]] = {}
    shapes: dict[str, list[str]] = {}
    for scarce in dict.fromkeys(row.scarce for row in rows):
        with (
            tempfile.TemporaryDirectory(prefix="tollhouse-bench-") as home,
            embedded(Path(home) / "data", dict(scarce)) as site,
        ):
            for row in (each for each in rows if each.scarce == scarce):
                felt = asyncio.run(meet(site, row, options.seconds))
                found.setdefault(row.resource, []).append(felt)
                shapes.setdefault(row.resource, []).append(row.shape)
                first, route = max(felt.first_tokens, default=0.0), max(felt.routes, default=0.0)
                progress(
                    f"  {row.resource}, {row.shape}: first token {first:.2f} s, "
                    f"routes {route:.2f} s, {felt.refused} refused; "
                    f"{felt.accepted} calls of the attack were taken"
                )
    empty = [each for each, felts in found.items() if not all(felt.accepted for felt in felts)]
    for resource in empty:  # its row says nothing of the resource
        progress(f"failed: {resource}: no call of an attack was taken")
        del found[resource]
    settings: dict[str, Any] = {"plan": PLAN, "seconds": options.seconds}
    for resource, felts in found.items():
        report(resource, felts, settings | {"shapes": shapes[resource]})
    if found:  # else nothing was measured
        report("all", [each for felts in found.values() for each in felts], settings)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
