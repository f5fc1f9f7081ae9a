"""Logging to stderr, as text or JSON, with the request id and with secrets redacted."""

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

request_id: ContextVar[str] = ContextVar("request_id", default="")

_SECRETS = re.compile(
    r"(th_[0-9A-Za-z]{4})[0-9A-Za-z]+|(sk_(?:live|test)_|whsec_|rk_live_)\w+|(://[^:/\s]+:)[^@\s]+@"
)


def redact(text: str) -> str:
    def _mask(match: re.Match[str]) -> str:
        head = match.group(1) or match.group(2)
        return f"{head}…" if head else f"{match.group(3)}…@"

    return _SECRETS.sub(_mask, text)


class _ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        where = f" [{request_id.get()}]" if request_id.get() else ""
        line = f"{_timestamp(record)} {record.levelname.lower():7} {record.name}{where}: "
        line += record.getMessage()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redact(line)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if request_id.get():
            fields["request_id"] = request_id.get()
        if record.exc_info:
            fields["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


def configure(level: str = "info", shape: str = "console") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if shape == "json" else _ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("uvicorn.access", "alembic", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
