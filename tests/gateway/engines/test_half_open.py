"""A half-open breaker closes at the first token of its probe, not at the end of the generation."""

import threading
import time
from pathlib import Path

import httpx

from tests.gateway.deployment import MODEL, running_deployment


def test_the_first_token_of_the_probe_closes_the_breaker(tmp_path: Path) -> None:
    with running_deployment(tmp_path, token_delay_s=0.05) as deployment:
        breaker = deployment.services.router.of(MODEL)[0].breaker
        for _ in range(3):
            breaker.failed()
        deadline = time.monotonic() + 20
        while breaker.state != "half_open":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        arrived = threading.Event()
        body = {"model": MODEL, "prompt": list(range(5, 25)), "max_tokens": 400, "stream": True}
        url = f"{deployment.url}/v1/completions"

        def probe() -> None:
            with httpx.stream("POST", url, json=body, headers=deployment.headers, timeout=60) as a:
                for line in a.iter_lines():
                    if line.startswith("data:"):
                        arrived.set()
                        return

        thread = threading.Thread(target=probe)
        thread.start()
        assert arrived.wait(30)
        assert breaker.state == "closed", "although 400 tokens take 20 s"
        thread.join(30)
