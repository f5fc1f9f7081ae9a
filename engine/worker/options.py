"""The worker's command line: an option for every setting of EngineConfig."""

import argparse
import json
import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    config: EngineConfig
    fake: bool
    exit_with_parent: bool
    report_alive: bool


# From this size on a CPU runs at full speed; a longer step only adds latency.
CPU_BATCH_TOKENS = 512

_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str}


def parse(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="tollhouse engine", description=__doc__)
    parser.add_argument(
        "--fake", action="store_true", help="use a deterministic runner without a model"
    )
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="exit when the parent process ends"
    )
    parser.add_argument(
        "--report-alive",
        action="store_true",
        help="print a JSON line each second, for a supervisor",
    )
    parser.add_argument(
        "--receipts",
        "--receipts-file",
        dest="receipts_file",
        help="file that keeps receipts across restarts",
    )
    parser.add_argument(
        "--public-prefixes",
        dest="public_file",
        help="JSON file with the token id lists whose cache all tenants share",
    )
    for field in fields(EngineConfig):
        if field.name in ("public_prefixes", "receipts_file"):
            continue
        name = "--" + field.name.replace("_", "-")
        kind = str(field.type).split(" | ")[0].replace("<class '", "").replace("'>", "")
        if kind == "bool":
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(
                name, type=_TYPES[kind], default=None, required=field.default is MISSING
            )
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    if "max_batch_tokens" not in given and not os.path.exists("/dev/nvidiactl"):
        given["max_batch_tokens"] = CPU_BATCH_TOKENS
    fake, with_parent = given.pop("fake"), given.pop("exit_with_parent")
    report_alive = given.pop("report_alive")
    public = given.pop("public_file", None)
    if public is not None:
        given["public_prefixes"] = _read_prefixes(Path(public))
    return Options(EngineConfig(**given), fake, with_parent, report_alive)


def _read_prefixes(path: Path) -> tuple[tuple[int, ...], ...]:
    try:
        lists = json.loads(path.read_text())
        return tuple(tuple(int(token) for token in ids) for ids in lists)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--public-prefixes {path} is not a JSON list of lists of token ids: {error}"
        ) from error
