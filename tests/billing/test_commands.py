"""The finance commands, as a person or a script calls them."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.clock import FakeClock, SystemClock
from gateway.cli.main import main
from tests.billing.conftest import Deployment


@pytest.fixture
def shop(lite: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", lite.database.url)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    lite.clock = FakeClock(SystemClock().now())
    return lite


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_invoice_run_and_audit_agree_with_the_usage(
    shop: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [shop.event(input_tokens=1000, cached_tokens=n, output_tokens=n) for n in range(9)]
    shop.record(*events)
    report = call(capsys, "invoice", "run", "--tenant", "acme")
    (invoice,) = report["invoices"]
    assert invoice["usage"] == {
        "prompt_tokens": 9000,
        "cached_tokens": 36,
        "completion_tokens": 36,
        "waived_tokens": 27,
    }
    expected = (9000 - 36) * 150_000 + 36 * 75_000 + 36 * 600_000
    assert invoice["exact"]["units"] == str(expected)
    assert invoice["subtotal"]["minor"] == sum(line["billed"]["minor"] for line in invoice["lines"])
    audit = call(capsys, "audit")
    assert (audit["clean"], audit["lost"], audit["duplicated"]) == (True, 0, 0)
    assert audit["ledger_error"] == "0"
    assert audit["steps"]["events"]["count"] == audit["steps"]["charges"]["count"] == 9
    assert call(capsys, "invoice", "run", "--tenant", "acme")["invoices"] == [
        {**invoice, "drafted_at": invoice["drafted_at"]}
    ]
    days = call(capsys, "usage", "show", "--tenant", "acme")
    assert sum(day["input_tokens"] for day in days) == 9000


def test_audit_exits_1_on_a_difference(
    shop: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    from sqlalchemy import text

    event = shop.event()
    shop.record(event, shop.event())
    shop.rate()
    with shop.database.transaction() as session:
        session.execute(text("drop trigger append_only_charges_delete"))
        session.execute(
            text("delete from charges where request_id = :id"), {"id": event.request_id}
        )
    audit = call(capsys, "audit", code=1)
    assert audit["lost"] == 1
    assert event.request_id in audit["differences"][0]["request_ids"]


def test_prices_are_tried_set_listed_and_compared(
    shop: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = call(capsys, "price", "try", "--model", "m", "--input", "2", "--output", "8")
    assert tried["total"]["amount"] == "10"
    tiers = '{"scheme": "graduated", "tiers": [{"up_to": 5, "price": "1"}]}'
    assert main(["price", "set", "--model", "m", "--output", tiers]) == 2
    assert "gap" in capsys.readouterr().err
    one = call(capsys, "price", "set", "--model", "m", "--input", "2", "--from", "2026-01-01")
    assert main(["price", "set", "--model", "m", "--input", "3", "--from", "2025-01-01"]) == 2
    assert "overlaps" in capsys.readouterr().err
    other = call(capsys, "price", "set", "--model", "m", "--input", "3", "--from", "2026-03-01")
    rows = call(capsys, "price", "list", "--model", "m")
    assert [row["id"] for row in rows] == [other["id"], one["id"]]
    assert rows[1]["effective_to"] == rows[0]["effective_from"]
    (change,) = call(capsys, "price", "diff", one["id"], other["id"])
    assert change["difference"] == "1"


def test_an_invoice_is_shown_printed_and_paid(
    shop: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.record(shop.event(output_tokens=10_000_000))
    call(capsys, "invoice", "run")
    (row,) = call(capsys, "invoice", "list", "--tenant", "acme")
    page = tmp_path / "invoice.html"
    assert main(["invoice", "show", row["id"], "--html", str(page)]) == 0
    assert "demo, output tokens" in page.read_text()
    assert main(["invoice", "show", "TH-000009"]) == 2


def test_a_wrong_price_is_corrected_after_a_look(
    shop: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.record(shop.event(input_tokens=1_000_000, cached_tokens=0, output_tokens=0))
    shop.rate()
    right = call(capsys, "price", "set", "--model", "demo", "--tenant", "acme", "--input", "0.10")
    words = ["price", "rerate", "--version", shop.version.id, "--by", right["id"]]
    words += ["--from", "2020-01-01", "--to", "2100-01-01"]
    (dry,) = call(capsys, *words, "--dry-run")
    assert (dry["tenant_id"], dry["difference"]) == ("acme", "-0.05")
    assert call(capsys, *words) == [dry]
    assert call(capsys, *words) == []
    assert call(capsys, "audit")["clean"]
    (invoice,) = call(capsys, "invoice", "run")["invoices"]
    assert invoice["exact"]["amount"] == "0.1"


def test_dead_tasks_are_listed_and_replayed(
    shop: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    import billing.tasks
    from core import dead_letters

    shop.record(shop.event())
    keep = dead_letters.keeper(shop.database, shop.clock)
    keep(billing.tasks.rate_events, {}, RuntimeError("the database was away"), 9)
    (dead,) = call(capsys, "worker", "--dead")
    assert (dead["task"], dead["attempts"]) == ("billing.rate_events", 9)
    assert "was away" in dead["error"]
    assert call(capsys, "worker", "--replay", str(dead["id"])) == {"replayed": 1}
    assert call(capsys, "worker", "--dead") == []
    assert shop.rate() == 0  # the replayed task has rated it
