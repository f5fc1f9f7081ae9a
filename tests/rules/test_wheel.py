"""What is installed is what the design lists: seven packages and nothing else at the top."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"core", "gateway", "engine", "billing", "moderation", "dashboards", "migrations"}


@pytest.mark.slow
def test_the_wheel_s_top_level_is_the_product(tmp_path: Path) -> None:
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    for name in listed:
        if name and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    # Without the extensions, which are optional: tests of the kernels compile them.
    environment = os.environ | {"CC": "false"}
    subprocess.run(
        [*command, "-w", str(tmp_path), str(source)], check=True, timeout=280, env=environment
    )
    wheel = next(tmp_path.glob("tollhouse-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == PACKAGES
    ours = [name for name in listed if name.split("/")[0] in PACKAGES and (ROOT / name).is_file()]
    assert not sorted(set(ours) - set(names)), "tracked and not shipped"
