"""Builds the documentation as a site: `make docs-site` writes it to build/site. A warning is an error."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/docs"
_FOLDERS = ("docs", "billing", "deploy", "engine", "gateway", "moderation")
_SHIPPED_BY_OTHERS = "swagger_ui"


def collect() -> None:
    """The pages and their pictures, where the repository has them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in map(Path, listed.splitlines()):
        page = name.suffix == ".md" or name.parts[0] == "docs"
        if (
            page
            and name.parts[0] in (*_FOLDERS, name.name)
            and _SHIPPED_BY_OTHERS not in name.parts
        ):
            (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, PAGES / name)


if __name__ == "__main__":
    collect()
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(ROOT / "mkdocs.yml"),
    ]
    sys.exit(subprocess.call(command, cwd=ROOT))
