"""A second engine behind the whole gateway: llama.cpp's server with SmolLM2, its usage and our ledger.

    python -m benchmarks.second_engine [--made]

The first call makes the server's environment outside the repository (it compiles llama.cpp: some 10
minutes of a core) and fetches SmolLM2 (98 MB); `--made` refuses instead. Then each prompt is asked of
the server itself and through the gateway, whole and streamed, on four surfaces. The server decodes
greedily, so that the usage that it reports for its own answer is that of the same answer through the
gateway. It reports none in streams: those are counted by the tokenizer. Figures: answers whose text
differs, and whose usage or usage event is not what the server reports; the audit's differences.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import text

from benchmarks.cpu.environments import LLAMA_SERVER, SCRIPTS, ready
from benchmarks.gateway_load.mock import free_port
from benchmarks.gateway_load.own import ROOT, GatewayProcess, own_gateway
from benchmarks.home import home
from benchmarks.report import figure, progress
from core.database import Database

MODEL = "smollm2"
_START_S = 120
NOT_TO_BE_HAD = 3  # exit status: neither a failure nor a result
_MAX_TOKENS = 24
PROMPTS = (
    "Name three fruits.",
    "What is the capital of France? Answer in one word.",
    "Count from one to five.",
    "Écris une phrase courte sur un pont 😀.",
    "Say only: yes",
)
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@dataclass(frozen=True, slots=True)
class Answer:
    """`input` and `output` are what the answer says of its usage; -1: nothing."""

    text: str
    input: int
    output: int
    request_id: str = ""


def is_made() -> bool:
    """Whether the server and the model are at hand without installing anything."""
    return (home() / LLAMA_SERVER.environment / ".ready").exists() and model_file() is not None


def model_file() -> Path | None:
    return next((home() / "models").rglob("SmolLM2*.gguf"), None)


def make() -> bool:
    if model_file() is None:
        command = [sys.executable, "-m", "gateway.cli.main", "model", "fetch", MODEL]
        environment = os.environ | {"TOLLHOUSE_DATA_DIR": str(home() / "models")}
        if subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr).returncode:
            return False
    return ready(LLAMA_SERVER) is not None


@contextlib.contextmanager
def llama_server() -> Iterator[str]:
    """Its URL, once it answers."""
    port, python, model = free_port(), ready(LLAMA_SERVER), model_file()
    script = SCRIPTS / LLAMA_SERVER.script
    command = [str(python), str(script), str(model), MODEL, str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=home(), stdout=log, stderr=log)
        try:
            _await(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _await(url: str, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"llama.cpp's server did not start ({process.poll()})")
        time.sleep(0.2)


@contextlib.contextmanager
def gateway_to(url: str, directory: Path) -> Iterator[GatewayProcess]:
    entry = {
        "url": url,
        "name": "llama.cpp",
        "engine": "llama.cpp",
        "model": MODEL,
        "tokenizer": str(model_file()),
        "context_length": 2048,
    }
    settings = {"TOLLHOUSE_UPSTREAMS": json.dumps([entry]), "TOLLHOUSE_PIN_WORKERS": "false"}
    with own_gateway(directory, url, settings=settings) as made:
        yield made


def ask(url: str, route: str, prompt: str, *, key: str = "none", stream: bool = False) -> Answer:
    headers = {"authorization": f"Bearer {key}"}
    body = _body(route, prompt, stream)
    answer = httpx.post(f"{url}{route}", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    events = [json.loads(line) for line in lines] if stream else [answer.json()]
    found = "".join(_text(each, stream) for each in events)
    used: dict[str, Any] = {}
    for each in events:
        inner = each.get("response") or each.get("message")
        used |= (each.get("usage") or (inner if isinstance(inner, dict) else {}).get("usage")) or {}
    return Answer(
        found,
        used.get("prompt_tokens", used.get("input_tokens", -1)),
        used.get("completion_tokens", used.get("output_tokens", -1)),
        answer.headers.get("x-request-id", ""),
    )


def _body(route: str, prompt: str, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "stream": stream, "temperature": 0}
    if route == "/v1/responses":
        return body | {"input": prompt, "max_output_tokens": _MAX_TOKENS}
    body["max_tokens"] = _MAX_TOKENS
    if stream and route != "/v1/messages":
        body["stream_options"] = {"include_usage": True}
    if route == "/v1/completions":
        return body | {"prompt": prompt}
    return body | {"messages": [{"role": "user", "content": prompt}]}


def _text(event: dict[str, Any], stream: bool) -> str:
    """Of an answer, or of an event of a stream, of any surface."""
    if stream and "type" in event:
        delta = event.get("delta")
        if event["type"] == "content_block_delta":
            return str(event["delta"]["text"])
        return str(delta) if event["type"] == "response.output_text.delta" else ""
    found = []
    for choice in event.get("choices") or ():
        holder = choice.get("delta") or choice.get("message") or choice
        found.append(holder.get("content") or holder.get("text") or "")
    for part in event.get("content") or ():
        found.append(part["text"])
    for item in event.get("output") or ():
        found += [part["text"] for part in item.get("content") or ()]
    return "".join(found)


@dataclass(slots=True)
class Compared:
    answers: int = 0
    texts: int = 0  # that differ
    usages: int = 0  # that are not the server's
    events: int = 0  # usage events that are not what the answer said


def compare(server: str, gateway: GatewayProcess) -> Compared:
    found, told = Compared(), dict[str, Answer]()
    for prompt in PROMPTS:
        for route in ROUTES:
            own = route if route == "/v1/completions" else ROUTES[0]
            expected = ask(server, own, prompt)
            for stream in (False, True):
                answer = ask(gateway.url, route, prompt, key=gateway.key, stream=stream)
                told[answer.request_id] = answer
                found.answers += 1
                found.texts += answer.text.strip() != expected.text.strip()
                wrong = answer.output != expected.output or answer.input != expected.input
                found.usages += wrong
                how = "streamed" if stream else "whole"
                progress(f"{route} {how}: {answer.input} + {answer.output} tokens {answer.text!r}")
                if wrong or answer.text.strip() != expected.text.strip():
                    progress(f"  but the server itself: {expected}")
    found.events = _wrong_events(gateway, told)
    return found


def _wrong_events(gateway: GatewayProcess, told: dict[str, Answer]) -> int:
    query = text("select request_id, input_tokens, output_tokens, counted_by from usage_events")
    until = time.monotonic() + 60
    while True:
        database = Database(gateway.database_url)
        with database.read() as session:
            rows = {row.request_id: row for row in session.execute(query)}
        database.close()
        if told.keys() <= rows.keys() or time.monotonic() > until:
            break
        time.sleep(0.2)
    wrong = 0
    for request_id, answer in told.items():
        row = rows.get(request_id)
        wrong += row is None or (row.input_tokens, row.output_tokens) != (
            answer.input,
            answer.output,
        )
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_engine", description=__doc__)
    parser.add_argument("--made", action="store_true", help="make nothing, only run")
    chosen = parser.parse_args(arguments)
    if not (is_made() if chosen.made else make()):
        progress("llama.cpp's server or SmolLM2 cannot be had here: nothing was compared")
        return NOT_TO_BE_HAD
    with (
        tempfile.TemporaryDirectory(prefix="tollhouse-bench-") as directory,
        llama_server() as server,
        gateway_to(server, Path(directory)) as gateway,
    ):
        found = compare(server, gateway)
        report = gateway.audit()
    values = {
        "texts_that_differ": found.texts,
        "usages_that_differ": found.usages,
        "events_that_differ": found.events,
        "audit_differences": len(report["differences"]) + (not report["clean"]),
    }
    for name, value in values.items():
        figure(
            f"second_engine.{name}",
            value,
            "",
            False,
            "llama.cpp",
            0,
            at_least=0,
            aim=0,
            settings={"answers": found.answers},
        )
    return 1 if any(values.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
