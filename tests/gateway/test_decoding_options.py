"""What a client asks of decoding reaches the engine, and what cannot be meant is refused by name."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.demo.paths import MODEL_DIR
from tests.gateway.deployment import MODEL, Deployment

PLAIN: dict[str, Any] = {
    "typical_p": 0.9, "top_n_sigma": 1.5, "min_p": 0.05, "top_k": 7, "dry_multiplier": 0.8,
    "dry_base": 1.6, "dry_allowed_length": 3, "lz_penalty": 0.2, "repetition_penalty": 1.1,
    "min_tokens": 2,
}  # fmt: skip


def post(deployment: Deployment, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "a b", "max_tokens": 4, **fields}
    url = f"{deployment.url}/v1/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=30)


def test_options_reach_the_engine(deployment: Deployment) -> None:
    response = post(
        deployment, **PLAIN, allowed_token_ids=[5, 9], bad_words=["toll", "gate keeper"]
    )
    assert response.status_code == 200, response.text
    sampling = deployment.engine.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in PLAIN} == PLAIN
    assert sampling.allowed_token_ids == (5, 9)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    spelled = [tokenizer.decode(list(ids)) for ids in sampling.bad_words]
    assert [text.strip() for text in spelled] == ["toll", "toll", "gate keeper", "gate keeper"]
    breaking = [tokenizer.decode([token]) for token in sampling.dry_breakers]
    assert breaking and all(any(c in text for c in '\n:"*') for text in breaking)
    post(deployment, dry_multiplier=1.0, dry_sequence_breakers=[])
    assert deployment.engine.submitted[-1].sampling.dry_breakers == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0), ("typical_p", 1.2), ("dry_base", 0.5), ("dry_multiplier", -1),
        ("dry_allowed_length", 0), ("lz_penalty", 11), ("bad_words", [""]),
        ("bad_words", ["x" * 300]), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(
    deployment: Deployment, name: str, value: Any
) -> None:
    response = post(deployment, **{name: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(name)
