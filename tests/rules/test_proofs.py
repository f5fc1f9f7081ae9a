"""Which proofs a change calls for, by files that one knows to matter to them."""

import json
from pathlib import Path

import pytest

from tests import proofs


def test_every_proof_is_found() -> None:
    marked = {each.as_posix() for each in proofs.proofs()}
    assert "tests/journeys/test_kill.py" in marked
    assert "tests/rules/test_layout.py" not in marked


@pytest.mark.parametrize(
    ("proof", "within"),
    [
        ("tests/journeys/test_kill.py", "gateway/metering/spool.py"),  # it says so
        ("tests/journeys/test_kill.py", "core/events.py"),  # which that imports
        ("tests/journeys/test_kill.py", "gateway/cli/main.py"),  # a process that it starts
        ("tests/journeys/test_kill.py", "tests/journeys/deployments.py"),
        ("tests/journeys/test_rolling_restart.py", "docs/production.md"),
        ("tests/billing/simulation/test_simulation.py", "billing/rating/rating.py"),
        ("tests/journeys/test_kill.py", "tests/conftest.py"),
        ("tests/journeys/test_kill.py", "constraints.txt"),
    ],
)
def test_what_a_proof_depends_on(proof: str, within: str) -> None:
    assert Path(within) in proofs.covered(Path(proof))


def test_the_engine_is_proved_without_what_imports_it() -> None:
    apart = [each for each in proofs.proofs() if each.parts[1] == "engine"]
    files = set().union(*(proofs.covered(each) for each in apart))
    assert any(each.suffix in (".c", ".h") for each in files)
    assert not [each for each in files if each.parts[0] == "billing"]


def test_a_digest_changes_with_any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proofs.proofs()[0]
    before = proofs.digest(proof)
    content = proofs.content_digest
    for changed in sorted(proofs.covered(proof))[::150]:
        other = lambda path, c=changed: b"changed" if path == c else content(path)  # noqa: E731
        monkeypatch.setattr(proofs, "content_digest", other)
        assert proofs.digest(proof) != before


def test_what_a_proof_protects_exists() -> None:
    for proof in proofs.proofs():
        for path in proofs.protected(proof):
            assert proofs.below(path), f"{proof} protects {path}, which does not exist"


def test_a_proof_that_starts_the_product_says_what_it_protects() -> None:
    """It reaches every file, so every change would call for it."""
    command = Path("gateway/cli/main.py")
    silent = [
        proof.as_posix()
        for proof in proofs.proofs()
        if not proofs.protected(proof) and command in proofs.covered(proof)
    ]
    assert not silent


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ("gateway/admin/keys/routes.py", 0.1),
        ("billing/invoicing/invoices.py", 0.25),
        ("engine/backends/gpu/attention.py", 0.45),
        ("dashboards/templates/alerts.html", 0.1),
        ("docs/operator.md", 0.0),
    ],
)
def test_a_change_in_one_folder_calls_for_few_proofs(
    changed: str, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = proofs.proofs()
    monkeypatch.setattr(proofs, "PASSED", tmp_path / "proofs.json")
    before = {each.as_posix(): proofs.digest(each) for each in every}
    assert proofs.due(before) == [*before]
    proofs.PASSED.write_text(json.dumps(before))
    assert not proofs.due(before)
    content = proofs.content_digest
    monkeypatch.setattr(
        proofs,
        "content_digest",
        lambda path: b"changed" if path == Path(changed) else content(path),
    )
    assert Path(changed) in proofs.tracked()
    due = proofs.due({each.as_posix(): proofs.digest(each) for each in every})
    assert due == [each.as_posix() for each in every if Path(changed) in proofs.covered(each)]
    assert len(due) <= part * len(every)


@pytest.mark.parametrize(
    ("status", "failed", "known", "written", "expected"),
    [
        (0, [], {}, {"a": "1", "b": "2"}, 0),
        (1, ["a::t[x]"], {}, {"b": "2"}, 0),  # not known to have passed: shown, and due again
        (1, ["a::t[x]"], {"a": "0"}, {"a": "0", "b": "2"}, 1),
        (1, [], {"a": "0"}, {"a": "0"}, 1),  # which failed is not known
        (3, ["a::t"], {"a": "0"}, {"a": "0"}, 3),
        (0, [], {"gone": "9"}, {"a": "1", "b": "2"}, 0),
    ],
)
def test_what_passed_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, status: int, failed: list[str],
    known: dict[str, str], written: dict[str, str], expected: int,
) -> None:  # fmt: skip
    failures = tmp_path / "lastfailed"
    monkeypatch.setattr(proofs.second_run, "FAILURES", failures)
    monkeypatch.setattr(proofs.second_run, "main", lambda _: status)
    monkeypatch.setattr(proofs, "PASSED", tmp_path / "proofs.json")
    monkeypatch.setattr(proofs, "proofs", lambda: [Path("a"), Path("b")])
    monkeypatch.setattr(proofs, "digest", {Path("a"): "1", Path("b"): "2"}.__getitem__)
    failures.write_text(json.dumps(dict.fromkeys(failed, True)))
    proofs.PASSED.write_text(json.dumps(known))
    assert proofs.main(["--all"]) == expected
    assert proofs.passed() == written
