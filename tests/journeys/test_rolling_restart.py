"""A small run of `benchmarks.rolling_restart`: no request fails while gateways are restarted in turn
behind nginx and HAProxy, with the files of docs/production.md."""

import asyncio
import shutil

import pytest

from benchmarks.rolling_restart import PROXIES, measure

PROTECTS = (
    "deploy",
    "docs/production.md",
    "gateway/edge/listening.py",
    "gateway/edge/http_protocol.py",
    "gateway/metering",
)


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("proxy", PROXIES)
def test_no_answer_fails_while_gateways_are_restarted(proxy: str) -> None:
    if shutil.which(proxy) is None:
        pytest.skip(f"{proxy} is not installed: apt-get install nginx-light haproxy")
    load = asyncio.run(measure(proxy, 200, rounds=1, clients=6))
    assert load.answers >= 200 and not load.failures, load.failures
