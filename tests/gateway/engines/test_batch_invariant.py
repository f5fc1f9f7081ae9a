"""`tollhouse serve --batch-invariant`: an answer has the same bits alone and beside others."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.backends.compiled.linear import has_kernel
from tests.journeys.deployments import Command, serve

PROTECTS = ("engine/runners/cpu", "engine/worker/server.py")


@pytest.mark.proof
@pytest.mark.skipif(
    not has_kernel(), reason="engine.backends.compiled was built without a C compiler"
)
def test_an_answer_has_the_same_bits_alone_and_beside_others(tmp_path: Path) -> None:
    running = serve(Command(tmp_path, {"TOLLHOUSE_BATCH_INVARIANT": "1"}))

    def ask(number: int) -> Any:
        body = {
            "model": "tollhouse-demo", "temperature": 1.0, "seed": number, "max_tokens": 24,
            "ignore_eos": True, "logprobs": True, "top_logprobs": 3,
            "messages": [{"role": "user", "content": "Tell me about the toll. " * (number + 1)}],
        }  # fmt: skip
        answer = httpx.post(
            f"{running.url}/v1/chat/completions", headers=running.headers, json=body, timeout=120
        )
        answer.raise_for_status()
        return answer.json()["choices"]

    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(ask, range(8)))
        assert [ask(number) for number in range(8)] == together
    finally:
        assert running.stop() == 0
