"""What a client asks of decoding reaches the engine, and what cannot be meant is refused by name."""

import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.templates import ChatTemplate
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_stays_where_that_is_asked(deployment: Deployment, stream: bool) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    deployment.engine.script = tokenizer.encode("One. Two. Three.", add_special_tokens=False).ids
    try:
        for included, said in ((False, "One. T"), (True, "One. Two")):
            fields = {"stop": "wo", "max_tokens": 30, "include_stop_str_in_output": included}
            answer = post(deployment, stream=stream, **fields)
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            parts = [json.loads(e) for e in events if e != "[DONE]"] if stream else [answer.json()]
            assert "".join(part["choices"][0]["text"] for part in parts) == said
    finally:
        deployment.engine.script = None


def test_only_the_prompts_last_tokens_are_read(deployment: Deployment) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    text = "a book of every ship " * 40
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for prompt in (text, ids, text * 50, ids * 50):  # the last two are longer than the context
        answer = post(deployment, prompt=prompt, truncate_prompt_tokens=7)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 7
        assert list(deployment.engine.submitted[-1].prompt) == ids[-7:]
        post(deployment, prompt=prompt, truncate_prompt_tokens=7, truncation_side="right")
        assert list(deployment.engine.submitted[-1].prompt) == ids[:7]
    assert post(deployment, truncation_side="middle").json()["error"]["param"] == "truncation_side"
    assert post(deployment, prompt=text * 50).status_code == 400
    assert post(deployment, truncate_prompt_tokens=0).status_code == 400


def test_effort_reaches_a_template_that_reads_it() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    both = ChatTemplate("{{ reasoning_effort }} {{ enable_thinking }}", {})
    assert both.render(chat, **both.effort_variables("high")) == "high True"
    thinks = ChatTemplate("{% if enable_thinking %}deep{% endif %}", {})
    assert thinks.render(chat, **thinks.effort_variables("low")) == "deep"
    assert thinks.render(chat, **thinks.effort_variables(None)) == ""
    assert not ChatTemplate("plain", {}).knows_effort
