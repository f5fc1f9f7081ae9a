"""/tokenize, /detokenize and /tokenizer_info: with a key that has one model, its name may be left out."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.demo.paths import MODEL_DIR
from tests.gateway.deployment import MODEL, Deployment, running_deployment


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    entry = {"url": "http://127.0.0.1:9", "tokenizer": str(MODEL_DIR)}
    listed = [{**entry, "name": name, "model": name} for name in (MODEL, "other")]
    path = tmp_path_factory.mktemp("tokens")
    settings = {"upstreams": json.dumps(listed)}
    with running_deployment(path, settings=settings, engines=None) as made:
        yield made


@pytest.fixture(scope="module")
def bound(gateway: Deployment) -> dict[str, str]:
    """The headers of a key that may use one model."""
    url = f"{gateway.url}/admin/v1/keys"
    listed = httpx.get(url, headers=gateway.headers, timeout=60).json()
    project = listed["data"][0]["project_id"]
    body = {"name": "one", "project_id": project, "scopes": {"models": [MODEL]}}
    made = httpx.post(url, json=body, headers=gateway.headers, timeout=60)
    assert made.status_code == 201, made.text
    return {"authorization": f"Bearer {made.json()['secret']}"}


def ask(gateway: Deployment, headers: dict[str, str], path: str, body: Any) -> httpx.Response:
    return httpx.post(gateway.url + path, json=body, headers=headers, timeout=60)


def test_a_key_of_one_model_names_none(gateway: Deployment, bound: dict[str, str]) -> None:
    named = ask(gateway, bound, "/tokenize", {"model": MODEL, "prompt": "Hi there"}).json()
    assert ask(gateway, bound, "/tokenize", {"prompt": "Hi there"}).json() == named
    text = ask(gateway, bound, "/detokenize", {"tokens": named["tokens"]}).json()["prompt"]
    assert text.endswith("Hi there")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert ask(gateway, bound, "/tokenize", chat).json()["count"] > 0


def test_a_key_of_several_models_names_one(gateway: Deployment) -> None:
    for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]})):
        answer = ask(gateway, gateway.headers, path, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"


def test_the_tokenizer_is_described(gateway: Deployment, bound: dict[str, str]) -> None:
    url = f"{gateway.url}/tokenizer_info"
    info = httpx.get(url, headers=bound, timeout=60).json()
    written = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    assert info["eos_token"] == written["eos_token"]
    assert "messages" in info["chat_template"] and info["tokenizer_class"]
    assert str(MODEL_DIR) not in json.dumps(info)
    several = httpx.get(url, headers=gateway.headers, timeout=60)
    assert several.status_code == 400 and several.json()["error"]["param"] == "model"
    chosen = httpx.get(url, params={"model": "other"}, headers=gateway.headers, timeout=60)
    assert chosen.json() == info
