"""A provider's usage report beside what we counted: each difference by day, model and key."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from billing.pricing.prices import ensure_default_prices
from billing.usage.usage import record
from core.clock import SystemClock
from core.database import Database
from core.errors import BadRequest
from core.events import Components
from gateway.admin.providers import reports
from gateway.cli.main import main
from tests.dashboards.usage_events import usage_event

DAY = datetime(2026, 11, 20, tzinfo=UTC)
UPSTREAMS = [
    {
        "provider": "openai",
        "name": "one",
        "model": "gpt",
        "upstream_model": "gpt-4o",
        "api_key": "k",
    },
    {
        "provider": "openai",
        "name": "two",
        "model": "gpt",
        "upstream_model": "gpt-4o",
        "api_key": "l",
    },
    {
        "provider": "anthropic",
        "name": "a",
        "model": "claude",
        "upstream_model": "claude-x",
        "api_key": "m",
    },
]
Shown = Callable[..., tuple[int, Any]]


def _openai(*rows: dict[str, Any]) -> str:
    bucket = {"object": "bucket", "start_time": int(DAY.timestamp()), "results": list(rows)}
    return json.dumps({"object": "page", "data": [bucket], "has_more": False})


def _anthropic(*rows: dict[str, Any]) -> str:
    bucket = {"starting_at": "2026-11-20T00:00:00Z", "results": list(rows)}
    return json.dumps({"data": [bucket], "has_more": False, "next_page": None})


def _row(input: int, cached: int, output: int, **more: Any) -> dict[str, Any]:
    """Of OpenAI: its input includes what was cached."""
    counts = {"input_tokens": input, "input_cached_tokens": cached, "output_tokens": output}
    return counts | {"num_model_requests": 1, "model": "gpt-4o-2024-08-06"} | more


@pytest.fixture
def shown(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shown:
    """What the command prints of a report, with usage of two keys and of another provider."""
    clock = SystemClock()
    noon = DAY.replace(hour=12)
    written = Components(cache_write_5m=30, cache_write_1h=10)
    with database.transaction() as session:
        price = ensure_default_prices(session, clock, "gpt").id
        events = [
            usage_event(
                noon, price, engine_id="one", input_tokens=100, cached_tokens=40, output_tokens=7
            ),
            usage_event(
                noon, price, engine_id="two", input_tokens=10, output_tokens=3, waived_tokens=2
            ),
            usage_event(noon, price, engine_id="else", input_tokens=9_999),
            usage_event(noon, price, engine_id="one", input_tokens=0, output_tokens=0, status=503),
            usage_event(
                noon,
                price,
                engine_id="a",
                input_tokens=100,
                cached_tokens=20,
                output_tokens=5,
                components=written,
            ),
        ]
        record(session, events, clock)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", database.url)
    monkeypatch.setenv("TOLLHOUSE_UPSTREAMS", json.dumps(UPSTREAMS))

    def _shown(report: str, provider: str, *more: str) -> tuple[int, Any]:
        file = tmp_path / "report.json"
        file.write_text(report)
        code = main(["provider", "reconcile", str(file), "--provider", provider, "--json", *more])
        told = capsys.readouterr()
        return code, json.loads(told.out) if told.out else told.err

    return _shown


def test_reports_that_agree_differ_in_nothing(shown: Shown) -> None:
    theirs = _openai(_row(100, 40, 7), _row(10, 0, 5, model="gpt-4o"))
    assert shown(theirs, "openai") == (0, [])
    _, rows = shown(theirs, "openai", "--all")
    assert {each["counted"]: each["ours"] for each in rows} == {
        "requests": 2,
        "input": 70,
        "cache_read": 40,
        "output": 12,
    }
    created = {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 10}
    row = {"uncached_input_tokens": 40, "cache_read_input_tokens": 20, "output_tokens": 5}
    whole = row | {"model": "claude-x", "cache_creation": created}
    assert shown(_anthropic(whole), "anthropic") == (0, [])


def test_differences_are_shown_by_day_model_and_key(shown: Shown) -> None:
    theirs = _openai(
        _row(100, 0, 7, api_key_id="key_1"),  # it gave no rebate
        _row(10, 0, 5, api_key_id="key_2"),
        _row(1, 0, 1, api_key_id="key_9", model="o3"),  # by another client with the account
    )
    keys = ("--key", "key_1=one", "--key", "key_2=two")
    code, rows = shown(theirs, "openai", *keys)
    assert code == 1
    found = {(r["model"], r["key"], r["counted"]): r["difference"] for r in rows}
    assert found == {
        ("gpt-4o", "one", "input"): 40,
        ("gpt-4o", "one", "cache_read"): -40,
        ("o3", "key_9", "requests"): 1,
        ("o3", "key_9", "input"): 1,
        ("o3", "key_9", "output"): 1,
    }
    assert {r["day"] for r in rows} == {"2026-11-20"}
    code, said = shown(theirs, "mistral")
    assert code == 2 and "No entry" in said
    code, said = shown(theirs, "openai", "--key", "key_1")
    assert code == 2 and "ID=ENTRY" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>", "not JSON"),
        ("[1]", "not a page"),
        ("{}", "no data"),
        ('{"data": []}', "no usage"),
        ('{"data": [{"results": []}]}', "data[0]"),
        (_openai(_row(1, 2, 0)), "more input is cached"),
        (_openai(_row(-1, 0, 0)), "input_tokens is -1"),
        (_openai(_row(1, 0, 0, model=None)), "group the report by model"),
        (_openai(_row(1, 0, 0, output_tokens=1.5)), "output_tokens is 1.5"),
        ('{"data": [], "has_more": true}', "more follows"),
        ('{"data": [{"start_time": 1e99, "results": []}]}', "data[0]"),
    ],
)
def test_a_report_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        reports.parse(text)
    assert said in caught.value.message


def test_pages_are_read_by_line_or_as_a_list() -> None:
    page = _openai(_row(5, 1, 2, model="m"))
    for text in (f"{page}\n{page}\n", f"[{page},{page}]"):
        (counted,) = reports.parse(text).values()
        assert counted == reports.Counted(2, 8, 2, 0, 4)
