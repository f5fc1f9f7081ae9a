"""Configurations of other gateways become ours, and what has no counterpart is listed."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.upstreams import read_upstreams
from gateway.catalog.virtual_models import read_virtual_models
from gateway.cli.main import main
from gateway.engines.routing.fallbacks import read_fallbacks

LITELLM = """
model_list:
  - model_name: gpt
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_KEY, rpm: 600, weight: 3}
  - model_name: gpt
    litellm_params:
      model: azure/eu-deployment
      api_base: https://ours.openai.azure.com
      api_version: "2024-10-21"
      api_key: azure-secret
      weight: 1
      tpm: 100000
  - model_name: claude
    litellm_params:
      model: claude-sonnet-4-5
      api_key: os.environ/MISSING_KEY
      input_cost_per_token: 3e-06
      output_cost_per_token: 0.000015
      cache_read_input_token_cost: 0.0000003
  - model_name: nova
    litellm_params: {model: bedrock/converse/amazon.nova-lite-v1:0, aws_region_name: eu-west-1}
  - model_name: gemini
    litellm_params: {model: vertex_ai/gemini-2.5-pro, vertex_project: p, vertex_location: europe-west4}
  - model_name: ours
    litellm_params: {model: hosted_vllm/qwen, api_base: "http://10.0.0.5:8000/v1"}
  - model_name: own
    litellm_params: {model: openai/local, api_base: "http://10.0.0.6:8000/v1", api_key: x}
  - model_name: "anthropic/*"
    litellm_params: {model: "anthropic/*"}
  - model_name: odd
    litellm_params: {model: watsonx/granite}
  - litellm_params: {model: openai/x}
router_settings:
  routing_strategy: simple-shuffle
  model_group_alias: {fast: gpt, lost: nowhere, hidden: {model: claude, hidden: true}}
litellm_settings:
  fallbacks: [{gpt: [hidden, nova]}, {gone: [gpt]}]
  default_fallbacks: [nova]
  max_budget: 250.5
  budget_duration: 30d
  callbacks: [langfuse]
general_settings: {master_key: sk-1234}
"""


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["import", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_configuration_of_litellm_is_read_by_the_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_KEY", "openai-secret")
    monkeypatch.delenv("MISSING_KEY", raising=False)
    source = tmp_path / "config.yaml"
    source.write_text(LITELLM)
    shown = _run(capsys, "litellm", str(source), "--output", str(tmp_path / "out"))
    text = json.dumps(shown)
    assert "secret" not in text.replace("client_secret", "")
    written = tmp_path / "out" / "upstreams.json"
    assert written.stat().st_mode & 0o777 == 0o600
    listed = json.loads(written.read_text())
    for each in listed:  # as an operator completes it
        if each.get("provider") == "anthropic":
            assert "api_key" not in each
            each["api_key"] = "k"
    found = {each.replica_name: each for each in read_upstreams(json.dumps(listed))}
    openai, azure = found["openai:gpt"], found["azure:gpt"]
    assert (openai.upstream_model, openai.api_key) == ("gpt-4o", "openai-secret")
    assert (openai.requests_per_minute, openai.canary_percent) == (600, None)
    assert (azure.upstream_model, azure.api_key) == ("eu-deployment", "azure-secret")
    assert (azure.url, azure.canary_percent) == ("https://ours.openai.azure.com", 25)
    assert azure.options == {"api_version": "2024-10-21"}
    claude = found["anthropic:claude"]
    assert claude.price == {"input": "3", "output": "15", "cached_input": "0.3"}
    assert found["bedrock:nova"].options == {"region": "eu-west-1"}
    assert found["bedrock:nova"].upstream_model == "amazon.nova-lite-v1:0"
    assert found["vertex:gemini"].options == {"project": "p", "location": "europe-west4"}
    assert (found["vllm:ours"].engine, found["vllm:ours"].url) == (
        "vllm",
        "http://10.0.0.5:8000/v1",
    )
    assert (found["server:own"].provider, found["server:own"].api_key) == ("", "x")
    pools = read_virtual_models(str(tmp_path / "out" / "virtual-models.json"))
    assert {n: each.members[0].model for n, each in pools.items()} == {
        "fast": "gpt",
        "hidden": "claude",
    }
    chains = read_fallbacks(json.dumps(shown["fallbacks"]))
    assert chains["gpt"] == ("claude", "nova") and chains["claude"] == ("nova",)
    assert "nova" not in chains
    assert shown["budgets"] == [{"name": "imported", "cap": "250.5", "window": "month"}]
    places = {each.partition(": ")[0] for each in shown["left_out"]}
    assert places == {
        "model_list[1].litellm_params.tpm",
        "model_list[2].litellm_params.api_key",
        "model_list[7]",
        "model_list[8]",
        "model_list[9]",
        "router_settings.routing_strategy",
        "router_settings.model_group_alias.lost",
        "litellm_settings.fallbacks.gone",
        "litellm_settings.callbacks",
        "general_settings.master_key",
    }
    again = ["import", "litellm", str(source), "--output", str(tmp_path / "out")]
    assert main(again) == 2 and "exists already" in capsys.readouterr().err


def test_a_configuration_of_portkey_becomes_a_virtual_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "portkey.json"
    targets = [
        {
            "provider": "openai",
            "api_key": "one",
            "weight": 0.7,
            "override_params": {"model": "gpt-4o", "temperature": 0},
        },
        {
            "provider": "anthropic",
            "api_key": "two",
            "weight": 0.3,
            "override_params": {"model": "claude-sonnet-4-5"},
            "retry": {"attempts": 3},
        },
        {"virtual_key": "theirs"},
    ]
    given = {"strategy": {"mode": "loadbalance"}, "targets": targets, "cache": {"mode": "simple"}}
    source.write_text(json.dumps(given))
    shown = _run(capsys, "portkey", str(source), "--name", "mix")
    assert shown["virtual_models"] == {
        "mix": {
            "choose": "weighted",
            "models": [{"model": "mix-1", "weight": 700}, {"model": "mix-2", "weight": 300}],
        }
    }
    assert [each["upstream_model"] for each in shown["upstreams"]] == [
        "gpt-4o",
        "claude-sonnet-4-5",
    ]
    places = {each.partition(": ")[0] for each in shown["left_out"]}
    assert places == {
        "targets[0].override_params.temperature",
        "targets[1].retry",
        "targets[2]",
        "cache",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a mapping"),
        ("a: [", "not YAML"),
        ("model_list: 3", "no model_list"),
        ("&a [*a]", "not a mapping"),
        ("targets: []", "no model_list"),
    ],
)
def test_what_is_no_configuration_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(text)
    assert main(["import", "litellm", str(source)]) == 2
    assert said in capsys.readouterr().err
    assert main(["import", "litellm", str(tmp_path / "missing.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"model": "openai/x", "rpm": -1}, "rpm: it is not a whole number"),
        ({"model": "openai/x", "weight": "3"}, "weight: it is not a whole number"),
        ({"model": "openai/x", "input_cost_per_token": "much"}, "cannot be read as prices"),
        ({"model": "openai/x", "input_cost_per_token": -1}, "cannot be read as prices"),
        ({"model": "azure/x"}, "no api_base"),
        ({"model": "bedrock/x"}, "no region"),
        ({"model": "hosted_vllm/x"}, "no api_base"),
        ({"model": 3}, "no model_name"),
        ("text", "no model_name"),
        (None, "no model_name"),
    ],
)
def test_odd_entries_are_said_and_end_nothing(
    params: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "config.json"
    good = {"model_name": "good", "litellm_params": {"model": "groq/llama", "api_key": "k"}}
    odd = {"model_name": "odd", "litellm_params": params}
    source.write_text(json.dumps({"model_list": [odd, good, 7]}))
    shown = _run(capsys, "litellm", str(source))
    assert "good" in [each["model"] for each in shown["upstreams"]]
    assert any(each.startswith("model_list[2]") for each in shown["left_out"])
    assert any(each.startswith("model_list[0]") and said in each for each in shown["left_out"])
    assert not any("price" in each for each in shown["upstreams"])
