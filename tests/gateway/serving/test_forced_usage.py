"""TOLLHOUSE_FORCE_INCLUDE_USAGE: streams end with their usage, whether or not the client asks for it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.deployment import MODEL, running_deployment

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi"}),
]


@pytest.mark.parametrize("forced", [True, False])
def test_streams_end_with_their_usage(tmp_path: Path, forced: bool) -> None:
    settings = {"force_include_usage": forced}
    with running_deployment(tmp_path, settings=settings) as deployment:
        for route, body in ROUTES:
            answer = httpx.post(
                deployment.url + route,
                json={"model": MODEL, "max_tokens": 2, "stream": True, **body},
                headers=deployment.headers,
                timeout=60,
            )
            lines = [each[6:] for each in answer.text.splitlines() if each.startswith("data: {")]
            usages = [usage for each in lines if (usage := json.loads(each).get("usage"))]
            assert [each["completion_tokens"] for each in usages] == ([2] if forced else []), route
