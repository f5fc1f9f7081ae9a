"""What the FinOps Foundation's own validator finds in our FOCUS export.

    python -m tests.focus_check [--file FILE.csv]

It is installed into an environment of its own in TOLLHOUSE_BENCH_HOME (default ~/.cache/tollhouse-focus)
and needs Python 3.12 or newer there, since it asks for old packages. The file, unless one is given, is
the export of two months of two tenants with every kind of line, in CSV and in Parquet. Exit status: 0
when nothing is found, 1 otherwise, 3 where it cannot be installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from billing.exports.encoding import chunks_of, export_of
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from core.clock import FakeClock
from core.events import UsageKind
from tests.billing.conftest import deployment_of
from tests.billing.exports.test_exports import make_busy
from tests.migrated import migrated

VERSION = "2.2.1"
_YEAR = Period(datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC))
_PRICE = {"audio_second": "0.0001", "character": "15", "image": "0.04"}
_NONE = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
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
# What the validator needs beside its own list, to run at all.
_PINNED = ("pyarrow<20",)


def exported(folder: Path) -> list[Path]:
    """Final invoices, a draft, a promotional credit, late usage, adapters, audio and images."""
    database = migrated(f"sqlite:///{folder / 'books.db'}")
    made = make_busy(deployment_of(database, FakeClock()))
    made.version = made.price(_PRICE, model="media")
    for kind in (UsageKind.AUDIO, UsageKind.SPEECH, UsageKind.IMAGE):
        made.record(made.event(kind=kind, model="media", units=7, **_NONE))
    made.rate()
    invoice_run.run(database, made.clock, current=True)
    files = []
    for form in (Format.CSV, Format.PARQUET):
        file = folder / f"focus.{form.value}"
        with database.read() as session, file.open("wb") as out:
            out.writelines(chunks_of(session, export_of("focus", "1.2"), form, None, _YEAR))
        files.append(file)
    database.close()
    return files


def validator() -> Path:
    """Its command, installed if it is not there yet."""
    home = Path(os.environ.get("TOLLHOUSE_BENCH_HOME", Path.home() / ".cache" / "tollhouse-focus"))
    place = home / f"focus-validator-{VERSION}"
    command = place / "bin" / "focus-validator"
    if command.exists():
        return command
    names = ("python3.13", "python3.12")
    python = (
        sys.executable
        if sys.version_info >= (3, 12)
        else next(filter(None, map(shutil.which, names)), None)
    )
    if python is None:
        raise SystemExit("focus-validator needs Python 3.12 or newer, which is not on the PATH.")
    subprocess.run([python, "-m", "venv", "--clear", place], check=True, timeout=_INSTALL_S)
    package = f"focus-validator=={VERSION}"
    install = [place / "bin" / "pip", "install", "-q", package, *_PINNED]
    subprocess.run(install, check=True, timeout=_INSTALL_S)
    return command


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
    passed = [] if rules.get(_EITHER) == "FAIL" else _ONE_OF
    return [name for name, state in rules.items() if state == "FAIL" and name not in passed]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, help="check this export instead")
    chosen = parser.parse_args(arguments)
    try:
        command = validator()
    except (subprocess.SubprocessError, OSError) as error:
        sys.stderr.write(f"focus-validator cannot be installed: {error}\n")
        return 3
    with tempfile.TemporaryDirectory() as folder:
        files = [chosen.file] if chosen.file else exported(Path(folder))
        found = {file.name: findings(command, file) for file in files}
    for name, lines in found.items():
        sys.stdout.write(f"{name}: {len(lines)} rules are broken\n")
        sys.stdout.write("".join(f"  {line}\n" for line in lines))
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
