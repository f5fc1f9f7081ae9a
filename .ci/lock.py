"""Writes constraints.txt: the version of every distribution that any extra installs, dev included.

    python3 .ci/lock.py              pins stay, what is missing is added, what nobody needs goes
    python3 .ci/lock.py --upgrade    resolves anew, to the newest versions that fit together;
                                     --keep NAME leaves the pin of a distribution as it is
    python3 .ci/lock.py --check      writes nothing; exit 1 where the file is not what it should be

pip resolves in an empty environment and installs nothing. torch comes first and alone: where the
index has its CPU build, a range that another package asks for would take the GPU build. What only a
GPU build asks for is left out, and triton is the version that this build names, so that one file
serves both.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
GPU_BUILD = ("nvidia-", "cuda-")  # of torch's own GPU wheels, which bring them in fitting versions


def main() -> int:
    parser = argparse.ArgumentParser(description="pin every distribution of every extra")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--upgrade", action="store_true", help="resolve anew")
    how.add_argument("--check", action="store_true", help="say what is missing; write nothing")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME")
    given = parser.parse_args()
    written = LOCK.read_text().splitlines()
    found = resolve(kept(written, given.keep) if given.upgrade else written)
    missing, surplus = sorted({*found} - {*written}), sorted({*written} - {*found})
    for line in surplus:
        print(f"- {line}")
    for line in missing:
        print(f"+ {line}")
    if given.check:
        if missing or surplus:
            print("constraints.txt is not complete: run `make lock`", file=sys.stderr)
        return 1 if missing or surplus else 0
    LOCK.write_text("\n".join(found) + "\n")
    print(f"constraints.txt: {len(found)} distributions")
    return 0


def kept(pins: list[str], names: list[str]) -> list[str]:
    """The pins that an upgrade leaves alone."""
    wanted = {canonical(name) for name in names}
    known = {canonical(line.partition("==")[0]): line for line in pins}
    if unknown := wanted - {*known}:
        sys.exit(f"constraints.txt pins no {', '.join(sorted(unknown))}")
    return [known[name] for name in sorted(wanted)]


def resolve(pins: list[str]) -> list[str]:
    """`name==version` lines of everything that pip would install, sorted."""
    with tempfile.TemporaryDirectory(prefix="tollhouse-lock-") as folder:
        home = Path(folder)
        venv.create(home / "venv", with_pip=True)
        torch = [line for line in pins if line.startswith("torch==")]
        if not torch:
            torch = [pin for pin in report(home, ["torch"], []) if pin.startswith("torch==")]
        triton = triton_of(home, torch[0])
        others = [line for line in pins if not line.startswith("torch==") and fits(line, triton)]
        found = report(home, requirements(), [*torch, *others, triton])
    kept = [pin for pin in found if not canonical(pin).startswith(GPU_BUILD)]
    return sorted(kept, key=str.lower)


def triton_of(home: Path, torch: str) -> str:
    """What torch's GPU build requires of triton: another one makes the extra `gpu` unresolvable.

    `===` takes the version without a local part, which is the GPU build of the public index.
    """
    (build,) = dry_run(home, "--no-deps", torch.replace("==", "==="))
    found = triton_in(build["requires_dist"])
    return found or sys.exit(f"the GPU build of {torch} names no version of triton")


def triton_in(requires_dist: list[str]) -> str | None:
    """`triton==3.7.1` or `triton~=3.9.0`, without its marker."""
    lines = (re.match(r"triton *((?:==|~=) *[\w.]+) *(?:;|$)", line) for line in requires_dist)
    return next((f"triton{found[1]}".replace(" ", "") for found in lines if found), None)


def fits(pin: str, triton: str) -> bool:
    """Whether a pin may stay beside what torch requires of triton."""
    if not pin.startswith("triton=="):
        return True
    least = triton.partition("=")[2].lstrip("=")
    series = least.rpartition(".")[0] + "."
    return pin == triton or ("~=" in triton and pin.partition("==")[2].startswith(series))


def report(home: Path, wanted: list[str], pins: list[str]) -> list[str]:
    (home / "wanted.txt").write_text("\n".join(wanted))
    (home / "pins.txt").write_text("\n".join(pins))
    files = "-r", str(home / "wanted.txt"), "-c", str(home / "pins.txt")
    return [pin(each["name"], each["version"]) for each in dry_run(home, *files)]


def dry_run(home: Path, *what: str) -> list[dict[str, Any]]:
    """The metadata of what pip would install into an empty environment."""
    out = home / "report.json"
    command = [str(home / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--dry-run"]
    command += ["--ignore-installed", "--report", str(out), *what]
    if subprocess.run(command, check=False).returncode:
        sys.exit("pip finds no versions that fit; `make upgrade` resolves without the pins")
    return [each["metadata"] for each in json.loads(out.read_text())["install"]]


def pin(name: str, version: str) -> str:
    """Without a local part (`+cpu`): the same version may be had as another build."""
    return f"{name}=={version.partition('+')[0]}"


def requirements() -> list[str]:
    """Of the base and of every extra; an extra that names others adds none of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    own = f"{project['name']}["
    return sorted({line for lines in lists for line in lines if not line.startswith(own)})


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
