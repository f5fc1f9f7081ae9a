"""`tollhouse plan`: text, JSON, exit codes and wrong use."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.settings import load_settings
from gateway.cli.main import main
from tests.migrated import migrated

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "data"))


def _plan(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    code = main(["plan", *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_has_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = _plan(
        capsys, "--model", "llama-3.1-70b", "--quantization", "fp8", "--gpu", "h100,h200"
    )
    assert code == 0
    assert shown["model"]["kv_bytes_per_token"] == 327_680
    plan = shown["plan"]
    assert plan["holds"] and plan["tpot_ms"] <= 40 and plan["ttft_ms"] <= 300
    assert plan["binds"] in ("bandwidth", "compute", "network", "launches")
    assert shown["device"]["price_source"] and shown["device"]["price_date"]
    assert shown["cost"]["per_hour"] == pytest.approx(
        plan["devices"] * shown["device"]["price_per_hour"], abs=1e-3
    )
    goodput = [point["goodput"] for point in shown["curve"]]
    assert max(goodput) > 0 and goodput[-1] == 0  # the curve ends beyond the knee


def test_a_config_file_is_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    _, of_file = _plan(capsys, "--model", str(path))
    _, of_name = _plan(capsys, "--model", "llama-3-8b")
    assert of_file["model"]["parameters"] == of_name["model"]["parameters"]
    assert of_file["plan"] == of_name["plan"]


def test_the_demo_model_is_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    from engine.demo.paths import MODEL_DIR

    code, shown = _plan(capsys, "--model", str(MODEL_DIR), "--gpu", "l4", "--rate", "1")
    assert code == 0 and shown["plan"]["devices"] == 1


def test_objectives_that_do_not_hold_are_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = _plan(capsys, "--model", "llama-3.1-405b", "--gpu", "h100", "--count", "1")
    assert code == 1
    assert not shown["plan"]["holds"] and not shown["memory"]["fits"]


def test_a_concurrency_is_a_rate_by_littles_law(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = _plan(
        capsys, "--model", "llama-3.1-8b", "--concurrency", "64", "--ttft", "0", "--tpot", "0"
    )
    plan, rate = shown["plan"], shown["workload"]["rate"]
    held = rate * (plan["ttft_ms"] + 300 * plan["tpot_ms"]) / 1000
    assert held == pytest.approx(64, rel=0.02)


def test_a_given_price_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = _plan(capsys, "--model", "llama-3.1-8b", "--gpu-price", "10")
    assert shown["cost"]["per_hour"] == 10 * shown["plan"]["devices"]


def test_text_says_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-8b"]) == 0
    text = capsys.readouterr().out
    assert "binds" in text and "128 KiB a token" in text and "runpod.io" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--gpu", "abacus"], "abacus"),
        (["--tp", "3"], "tp is 3"),
        (["--ep", "4"], "ep is 4"),
        (["--ttft", "soon"], "ttft"),
        (["--rate", "-1"], "rate"),
        (["--rate", "nan"], "rate"),
        (["--quantization", "int3"], "int3"),
        (["--kv-dtype", "int3"], "int3"),
        (["--server", "magic"], "magic"),
        (["--gpu-price", "-1"], "gpu-price"),
        (["--count", "-1"], "count"),
        (["--shared-prefix", "1000"], "shared-prefix"),
        (["--validate", "/no/such/file.csv"], "/no/such/file.csv"),
    ],
)
def test_wrong_use_is_exit_2_and_names_the_option(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options if "--model" in options else ["--model", "llama-3.1-8b", *options]
    assert main(["plan", *given]) == 2
    assert named in capsys.readouterr().err


def test_no_model_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "--model" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": "big"}', "null"])
def test_a_file_that_is_no_configuration_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", "--model", str(path)]) == 2
    assert capsys.readouterr().err


def test_validate_prints_the_errors_of_dense_models_and_mixtures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.engine.planning.test_measured import HEADER, ROW

    path = tmp_path / "points.csv"
    path.write_text(HEADER + ROW)
    assert main(["plan", "--validate", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["dense"]["points"] == 1 and shown["moe"]["points"] == 0
    assert {"tpot_mape", "ttft_mape"} <= set(shown["dense"])


def test_the_usage_of_the_busiest_hour_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    from datetime import UTC, datetime, timedelta

    from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
    from billing.usage.tables import HourlyUsage
    from gateway.admin.console import command_context

    migrated(load_settings().effective_database_url).close()
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    nothing = dict.fromkeys((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS), 0)
    with command_context() as tools, tools.database.transaction() as session:
        for hours, requests in ((2, 7200), (3, 3600)):
            session.add(
                HourlyUsage(
                    tenant_id="t", at=now - timedelta(hours=hours), project_id="p", key_id="k",
                    model="llama-3.1-8b", adapter="", kind="generation", price_version="v",
                    usage_period_id="u", bill_period_id="b", currency="USD",
                    **nothing | {"requests": requests, "input_tokens": 1000 * requests,
                     "cached_tokens": 400 * requests, "output_tokens": 200 * requests},
                )
            )  # fmt: skip
    capsys.readouterr()
    code, shown = _plan(capsys, "--model", "llama-3.1-8b", "--from-traffic", "7d")
    assert code == 0
    work = shown["workload"]
    assert (work["rate"], work["prompt_tokens"], work["output_tokens"]) == (2.0, 1000, 200)
    assert work["shared_prefix_tokens"] == 400
    assert main(["plan", "--model", "other", "--from-traffic", "7d"]) == 2
    assert "No usage" in capsys.readouterr().err
    assert main(["plan", "--model", "x", "--from-traffic", "soon"]) == 2


def test_a_running_engine_is_planned_by_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from engine.planning.simulation import Load
    from tests.engine.planning.test_own_steps import _engine_after

    page = _engine_after(Load(rate=12, requests=50, prompt=100, output=30)).metrics_text()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        asked = ("--engine", url, "--rate", "5", "--prompt", "40", "--output", "6")
        code, shown = _plan(capsys, *asked)
        again = _plan(capsys, *asked)[1]
    finally:
        server.shutdown()
        server.server_close()
    assert code == 0 and shown == again
    assert shown["steps_measured"] > 100 and shown["requests"] == 300
    assert shown["knee_rate"] > 5 and shown["goodput"] == pytest.approx(5, rel=0.25)


@pytest.mark.parametrize("url", ["ftp://x", "http://127.0.0.1:1/metrics", "file:///etc/passwd"])
def test_an_engine_that_does_not_answer_is_said(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--engine", url]) in (1, 2)
    assert url in capsys.readouterr().err
