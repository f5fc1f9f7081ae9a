"""Every benchmark, one after another, as `make bench` runs them: figures on stdout, one JSON object a
line, all else on stderr. One that fails does not stop the others; then the exit status is 1.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.report import progress


def names() -> list[str]:
    """One file a benchmark: those that can be run by themselves."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    runnable = [f.stem for f in files if "\nif __name__ ==" in f.read_text()]
    return [name for name in runnable if name != "__main__"]


def main() -> int:
    failed = []
    for name in names():
        progress(f"== {name}")
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
