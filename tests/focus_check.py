"""What others' validators find in our FOCUS exports of a drawn year.

    python -m tests.focus_check [--file FILE.csv]

For 1.2 it is the FinOps Foundation's focus-validator, with the rules that it brings along, and for 1.4
focus-data-toolkit: each dataset alone, and all four together. They are installed into environments of
their own in TOLLHOUSE_BENCH_HOME (default ~/.cache/tollhouse-focus); focus-validator needs Python 3.12
or newer there, since it asks for old packages. Without a file, which is checked as 1.2, the year of
`tests/billing/exports/focus_year.py` is played. Exit status: 0 when nothing is found, 1 otherwise, 3
where one cannot be installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

from billing.exports.encoding import chunks_of, export_of
from billing.exports.focus.tables import COST_AND_USAGE, DATASETS
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from core.clock import FakeClock
from tests.billing.conftest import START, deployment_of
from tests.billing.exports.focus_year import Year, end_of
from tests.migrated import migrated

VERSION, TOOLKIT = "2.2.1", "0.14.1"
_YEAR = Period(START, end_of(START.year))
_INSTALL_S, _RUN_S = 600, 300
# All criteria of FOCUS 1.2 but those of commitment discounts and capacity reservations, which there are
# none of here.
_CRITERIA = (
    *("ACCOUNT_NAMING", "AVAILABILITY_ZONE", "BILLING_BASED_ON_PROVISIONED_RESOURCES"),
    *(
        "MULTIPLE_BILLING_ACCOUNT_TYPES",
        "MULTIPLE_PRICING_CATEGORIES",
        "MULTIPLE_SUB_ACCOUNT_TYPES",
    ),
    *("NEGOTIATED_PRICING", "PRICING_BILLING_CURRENCY_DIFFERENCES", "PUBLIC_PRICE_LIST", "REGION"),
    *("RESOURCE_TYPE_ASSIGNMENT", "SUB_ACCOUNT", "TAGGING", "UNIT_PRICING", "USAGE_MEASUREMENT"),
    "VIRTUAL_CURRENCY",
)
# Either all rows have an invoice or none has: one of the two fails in every file.
_EITHER, _ONE_OF = "InvoiceId-C-003-C", ("InvoiceId-C-004-C", "InvoiceId-C-005-C")
# Its condition leaves out "intended to cover future charges": it is about every purchase, and our fees
# cover none.
_EVERY_PURCHASE = "EffectiveCost-C-005-C"
# What the validator needs beside its own list, to run at all.
_PINNED = ("pyarrow<20",)


def exported(folder: Path) -> list[Path]:
    """The year as 1.2 in CSV and in Parquet, and the datasets of 1.4 in CSV."""
    database = migrated(f"sqlite:///{folder / 'books.db'}")
    year = Year(deployment_of(database, FakeClock()), Random(5))
    for number, _ in enumerate(year.days()):
        if number % 3 == 0:
            invoice_run.run(database, year.deployment.clock, current=False)
    invoice_run.run(database, year.deployment.clock)
    wanted = [("1.2", COST_AND_USAGE, form) for form in (Format.CSV, Format.PARQUET)]
    wanted += [("1.4", dataset, Format.CSV) for dataset in DATASETS]
    files = []
    for version, dataset, form in wanted:
        file = folder / f"{version}-{dataset}.{form.value}"
        with database.read() as session, file.open("wb") as out:
            out.writelines(
                chunks_of(session, export_of("focus", version, dataset), form, None, _YEAR)
            )
        files.append(file)
    database.close()
    return files


def home() -> Path:
    return Path(os.environ.get("TOLLHOUSE_BENCH_HOME", Path.home() / ".cache" / "tollhouse-focus"))


def validator() -> Path:
    """Its command, installed if it is not there yet."""
    place = home() / f"focus-validator-{VERSION}"
    command = place / "bin" / "focus-validator"
    if command.exists():
        return command
    names = ("python3.13", "python3.12")
    python = (
        sys.executable
        if sys.version_info >= (3, 12)
        else next((found for found in map(shutil.which, names) if found and _runs(found)), None)
    )
    if python is None:
        raise OSError("focus-validator needs Python 3.12 or newer, which is not on the PATH")
    _install(place, python, f"focus-validator=={VERSION}", *_PINNED)
    return command


def _runs(python: str) -> bool:
    """A name on the PATH may stand for a version that is not chosen."""
    return (
        subprocess.run([python, "--version"], capture_output=True, timeout=_RUN_S).returncode == 0
    )


def toolkit() -> Path:
    place = home() / f"focus-data-toolkit-{TOOLKIT}"
    command = place / "bin" / "focus-toolkit"
    if not command.exists():
        _install(place, sys.executable, f"focus-data-toolkit=={TOOLKIT}")
    return command


def _install(place: Path, python: str, *packages: str) -> None:
    subprocess.run([python, "-m", "venv", "--clear", place], check=True, timeout=_INSTALL_S)
    install = [place / "bin" / "pip", "install", "-q", *packages]
    subprocess.run(install, check=True, timeout=_INSTALL_S)


def findings(command: Path, file: Path) -> list[str]:
    """One line a rule that the file breaks. RuntimeError if it did not run to its end."""
    criteria = ",".join(f"{name}_SUPPORTED" for name in _CRITERIA)
    options = [
        "--validate-version",
        "1.2",
        "--block-download",
        "--applicability-criteria",
        criteria,
    ]
    # It reads its list of currencies by a path relative to where it is installed.
    installed = next(command.parents[1].glob("lib/python*/site-packages"))
    done = subprocess.run(
        [command, "--data-file", file.resolve(), *options],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        cwd=installed,
    )
    rules = dict(re.findall(r"([A-Za-z]+-[A-Z]-\d+-[A-Z]): (PASS|FAIL|SKIPPED)", done.stdout))
    if len(rules) < 300:
        raise RuntimeError(f"the validator did not run: {(done.stdout + done.stderr)[-2_000:]}")
    passed = [_EVERY_PURCHASE, *(() if rules.get(_EITHER) == "FAIL" else _ONE_OF)]
    return [name for name, state in rules.items() if state == "FAIL" and name not in passed]


def toolkit_findings(command: Path, files: list[Path]) -> dict[str, list[str]]:
    """By file, and for all of them together."""
    named = {file.stem.removeprefix("1.4-"): file for file in files}
    found = {
        file.name: _told([command, "validate", file, "--dataset", dataset])
        for dataset, file in named.items()
    }
    options = [part for dataset, file in named.items() for part in (f"--{dataset}", file)]
    return found | {"the datasets of 1.4 together": _told([command, "validate-bundle", *options])}


def _told(arguments: list[str | Path]) -> list[str]:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=_RUN_S)
    lines = (done.stdout + done.stderr).splitlines()
    return (
        []
        if done.returncode == 0
        else [each for each in lines if each.startswith("ERROR")] or lines
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="check this export of 1.2 instead")
    chosen = parser.parse_args(arguments)
    try:
        command = validator()
        other = None if chosen.file else toolkit()
    except (subprocess.SubprocessError, OSError) as error:
        sys.stderr.write(f"a validator cannot be installed: {error}\n")
        return 3
    with tempfile.TemporaryDirectory() as folder:
        files = [chosen.file] if chosen.file else exported(Path(folder))
        old = [file for file in files if not file.name.startswith("1.4-")]
        found = {file.name: findings(command, file) for file in old}
        if other is not None:
            found |= toolkit_findings(other, [file for file in files if file not in old])
    for name, lines in found.items():
        sys.stdout.write(f"{name}: {len(lines)} rules are broken\n")
        sys.stdout.write("".join(f"  {line}\n" for line in lines))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
