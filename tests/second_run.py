"""Runs the suite, and what failed in it once more alone: `python -m tests.second_run ARGUMENTS`.

A machine with two busy cores can make a test fail that waits for another process. A few failures are
therefore judged by a second run without any other test; those that pass then are listed as unsteady,
which is a defect of the test to mend. Many failures are a verdict at once.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 6  # failures that a second run may judge
FAILED = 1  # pytest's exit status if tests failed, and nothing else went wrong
FAILURES = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: list[str]) -> int:
    """The exit status of pytest, after the second run if there is one."""
    FAILURES.unlink(missing_ok=True)
    status = subprocess.call([sys.executable, "-m", "pytest", *arguments])
    failed = sorted(json.loads(FAILURES.read_text())) if FAILURES.exists() else []
    if status != FAILED or not 0 < len(failed) <= MOST:
        return status
    say(f"== {len(failed)} failed: they run again, alone ==")
    status = subprocess.call([sys.executable, "-m", "pytest", "-q", *failed])
    if status == 0:
        say("== UNSTEADY: they failed among others and pass alone; each is a defect to mend ==")
        say("\n".join(failed))
    return status


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
