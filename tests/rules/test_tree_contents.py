"""The project speaks of the product alone: no paths of a machine, no secrets, no leftovers."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".html",
    ".css",
    ".js",
    ".json",
    ".yaml",
    ".yml",
    ".jinja",
    "",
}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def _offences(pattern: str) -> list[str]:
    wanted = re.compile(pattern)
    found = []
    for path in tracked():
        if path.suffix not in TEXT or path == Path(__file__) or path.stat().st_size > 2_000_000:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if wanted.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    return found


def test_no_path_of_a_builder_s_machine() -> None:
    assert not _offences(r"/(work|opt/pypi|opt/wheels|root|home/\w+)/")


def test_no_secret_is_in_the_tree() -> None:
    keys = (
        r"(sk_live_[0-9A-Za-z]{16,}|AKIA(?!IOSFODNN7)[0-9A-Z]{16}|^-----BEGIN [A-Z ]*PRIVATE KEY)"
    )
    assert not _offences(keys)


def test_nothing_is_left_to_do_in_the_code() -> None:
    assert not _offences(r"\b(TODO|FIXME|XXX|HACK)\b")


def test_the_repository_stays_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < 40_000_000
    heavy = [str(path) for path in tracked() if path.stat().st_size > 12_000_000]
    assert not heavy
