"""Logging to stderr, as text or JSON, with the request id and with secrets redacted."""

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

request_id: ContextVar[str] = ContextVar("request_id", default="")

# What stays of a secret, so that an operator can tell which one it was, is the first group.
_SECRETS = re.compile(
    "|".join(
        (
            r"\b(?P<own>th_[0-9A-Za-z]{4})[0-9A-Za-z]+",
            r"\b(?P<stripe>sk_live_|sk_test_|rk_live_|whsec_)\w+",
            r"\b(?P<vendor>sk-|gh[pousr]_|github_pat_|xox[abposr]-|hf_|glpat-|AKIA|ASIA|AIza)[\w-]{12,}",
            r"(?P<url>://[^:/\s]*:)[^@\s]+@",
            r"\b(?P<token>eyJ)[\w-]{5,}\.[\w-]{5,}\.[\w-]*",  # a JSON web token
            r"(?P<scheme>\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}",
            r"(?P<field>[\w-]*(?:password|passwd|secret|api[_-]?key|access[_-]?key|token)"
            r"[\"']?\s*(?:=|:)\s*[\"']?)(?![\"'\s])[^\s\"',;&}]{6,}",
            r"(?P<pem>-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*?(?:-----END [A-Z ]*-----|\Z)",
        )
    ),
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Mask keys, tokens and passwords in their usual forms."""

    def _mask(match: re.Match[str]) -> str:
        head = match.group(match.lastgroup or 0)
        return f"{head}…@" if match.lastgroup == "url" else f"{head}…"

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
    for chatty in ("uvicorn.access", "alembic", "httpx", "httpcore", "casbin"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
