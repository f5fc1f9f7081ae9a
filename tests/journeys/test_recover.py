"""`tollhouse recover` and `tollhouse doctor` after a restore, as an operator calls them."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from billing import tasks
from billing.invoicing.tables import Invoice
from billing.payments.fake_stripe.faults import Fault
from billing.restores.tables import Recovery
from core.clock import SystemClock
from core.settings import Settings
from core.tenants.models import ApiKey
from gateway.cli.doctor.check import Health
from gateway.cli.doctor.storage import history
from gateway.cli.main import main
from tests.billing.payments.stripe_deployment import SECRET
from tests.billing.recovery.restore_drill import Drill, open_drill

Capture = pytest.CaptureFixture[str]


def call(capture: Capture, *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capture.readouterr().out)


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drill]:
    """acme's month is invoiced and paid, and a key of it revoked, after the backup; the clock ends at
    the present, as commands know no other."""
    with open_drill(tmp_path / "drill", 1) as made:
        for name, value in (
            ("DATABASE_URL", made.deployment.database.url),
            ("DATA_DIR", str(made.settings.data_dir)),
            ("STRIPE_API_KEY", made.till.stripe.api_key),
            ("STRIPE_API_BASE", made.till.stripe.url),
            ("STRIPE_WEBHOOK_SECRET", SECRET),
        ):
            monkeypatch.setenv(f"TOLLHOUSE_{name}", value)
        clock = made.deployment.clock
        clock.set(SystemClock().now() - timedelta(days=40))
        made.use("acme")
        made.unreceipted.clear()
        made.tick()
        made.copy()
        clock.set(SystemClock().now() - timedelta(hours=1))
        for _ in range(3):
            made.tick()
        made.revoke()
        tasks.mark_position(made.context)
        clock.set(SystemClock().now())
        yield made


def test_an_operator_restores_and_recovers(drill: Drill, capsys: Capture) -> None:
    (paid,) = drill.at_stripe("invoice")
    assert paid["status"] == "paid"
    assert history(Settings(), drill.deployment.clock).health is Health.GOOD
    assert call(capsys, "recover") == {
        "behind": False,
        "reason": "",
        "dry_run": False,
        "erased": [],
        "problems": [],
    }

    drill.restore(0)
    drill.deployment.database.close()
    found = history(Settings(), drill.deployment.clock)
    assert found.health is Health.BAD and "tollhouse recover" in found.next_step
    assert "was restored from a backup; nothing is numbered or collected" in found.says
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert "was restored from a backup" in shown.out and "tollhouse recover" in shown.out
    assert "history" in shown.err.splitlines()[-1]
    dry = call(capsys, "recover", "--dry-run")
    assert (dry["behind"], dry["dry_run"]) == (True, True) and "mark" in dry["reason"]
    with drill.deployment.database.read() as session:
        assert session.scalar(select(Recovery.finished_at)) is None

    report = call(capsys, "recover")
    start = paid["metadata"]["tollhouse_period"][:10]
    assert report["invoices"] == [f"{paid['number']} of acme, period from {start}"]
    assert [each.split(":")[0] for each in report["refused"]] == [f"key {min(drill.revoked)}"]
    assert any("key.revoke" in each for each in report["lost_changes"])
    assert report["problems"] == []
    found = history(Settings(), drill.deployment.clock)
    assert found.health is Health.GOOD and not found.next_step
    with drill.deployment.database.read() as session:
        for name in drill.revoked:
            assert session.get_one(ApiKey, name).revoked_at is not None
    call(capsys, "invoice", "run")
    call(capsys, "payment", "sync")
    call(capsys, "payment", "sync")
    with drill.deployment.database.read() as session:
        again = session.scalars(select(Invoice).where(Invoice.label == paid["number"])).one()
    assert (again.external_id, again.due_minor) == (paid["id"], paid["total"])
    assert (again.status, again.paid_minor) == ("paid", paid["total"])
    drill.check()
    assert call(capsys, "recover")["behind"] is False


def test_what_the_operator_reads_names_each_part(drill: Drill, capsys: Capture) -> None:
    drill.restore(0)
    drill.deployment.database.close()
    assert main(["recover"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("The database had everything until ")
    assert (
        "1 invoice numbers that the next invoice run gives to the same tenant and period again"
        in lines
    )
    assert "1 keys, members and operators that are refused again" in lines
    assert lines[-1] == "Invoices are numbered and payments collected again."


def test_nothing_is_enabled_while_the_provider_does_not_answer(
    drill: Drill, capsys: Capture
) -> None:
    drill.restore(0)
    drill.deployment.database.close()
    drill.till.stripe.faults.plan("GET", *[Fault.LOST] * 20)
    assert main(["recover"]) == 1
    assert "payment provider does not answer" in capsys.readouterr().err
    assert history(Settings(), drill.deployment.clock).health is Health.BAD
    assert main(["recover", "--marks", "/nowhere"]) == 2
    assert "/nowhere is not a directory" in capsys.readouterr().err


def test_marks_of_other_machines_name_what_this_one_does_not(
    drill: Drill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """This machine has another data directory and no mark; the restored database is behind all the same
    once it is told where the marks are."""
    drill.restore(0)
    drill.deployment.database.close()
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path / "other"))
    assert call(capsys, "recover")["behind"] is False
    monkeypatch.setenv("TOLLHOUSE_RESTORE_STORE", str(drill.settings.data_dir / "restore"))
    report = call(capsys, "recover")
    assert len(report["invoices"]) == 1 and len(report["refused"]) == 1
