"""Which proofs a change calls for, by files that one knows to matter to them."""

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
        ("tests/journeys/test_kill.py", "gateway/cli/main.py"),  # a process that it starts
        ("tests/journeys/test_kill.py", "billing/rating/rating.py"),  # through other modules
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
