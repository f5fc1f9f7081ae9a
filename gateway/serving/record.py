"""A record of the process that runs on a data directory, for commands that run at the same time."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from core.settings import Settings
from gateway.catalog.model_files import served_names

_FILE = "serving.json"


@dataclass(frozen=True, slots=True)
class ServingRecord:
    url: str
    pid: int
    models: tuple[str, ...]  # public names, the one for newcomers first
    source: str  # as TOLLHOUSE_MODEL or --model had it; empty is the demo model

    @property
    def is_live(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def write_record(settings: Settings, url: str) -> None:
    """`settings` are as they were given, before names are resolved to files."""
    record = ServingRecord(url, os.getpid(), tuple(served_names(settings)), settings.model)
    beside = settings.data_dir / f".{_FILE}-{os.getpid()}"
    beside.write_text(json.dumps(asdict(record)), encoding="utf-8")
    beside.replace(settings.data_dir / _FILE)


def read_record(data_dir: Path) -> ServingRecord | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((data_dir / _FILE).read_text(encoding="utf-8"))
        url, pid = str(record["url"]), int(record["pid"])
        return ServingRecord(url, pid, tuple(map(str, record["models"])), str(record["source"]))
    return None


def url_here(settings: Settings) -> str:
    """Of the gateway that runs on this data directory; else where the settings would start one."""
    record = read_record(settings.data_dir)
    if record is not None and record.is_live:
        return record.url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def names_here(settings: Settings) -> tuple[str, ...]:
    """Models of the running server; without one, those of the settings, else the last ones served."""
    record = read_record(settings.data_dir)
    explicit = settings.model or settings.model_name or settings.upstreams
    if record is not None and (record.is_live or not explicit):
        return record.models
    return tuple(served_names(settings))
