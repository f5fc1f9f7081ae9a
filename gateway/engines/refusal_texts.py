"""The text of a server's refusal as a client may read it: without secrets and addresses."""

import re
from collections.abc import Sequence
from typing import Any

_REMOVED = "[removed]"
_MOST_CHARACTERS = 300
_HIDDEN = re.compile(
    r"[a-z][a-z0-9+.-]*://[^\s\"'<>]+"  # addresses
    r"|(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.]\d)"
    r"|\[?(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])\]?(?::\d+)?"
    r"|\b[a-z0-9-]+(?:\.[a-z0-9-]+)*:\d{2,5}\b"
    r"|\b[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:local|internal|lan|svc|home|corp)\b"
    r"|(?<![\w.:/])(?:~|[a-z]:)?[/\\][\w.@-]+(?:[/\\][\w.@-]+)+"  # files
    r"|\bbearer\s+\S+|\b(?:sk|pk|hf|ghp|gho|key|token|secret)[-_][\w-]{8,}"
    r"|(?<![\w+/-])(?=[\w+/-]*\d)[\w+/-]{32,}={0,2}",  # opaque keys
    re.IGNORECASE,
)


def client_text(detail: Any, secrets: Sequence[str] = ()) -> str:
    """The message in an error body, in one line; empty if it has none. `secrets` are removed first."""
    if isinstance(detail, dict):
        detail = detail.get("message") or detail.get("detail") or detail.get("error")
    if not isinstance(detail, str):
        return ""
    text = " ".join(detail[: 4 * _MOST_CHARACTERS].split())
    for secret in filter(None, secrets):
        text = text.replace(secret, _REMOVED)
    text = _HIDDEN.sub(_REMOVED, text)
    text = "".join(each for each in text if each.isprintable())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
