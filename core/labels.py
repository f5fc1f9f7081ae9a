"""Labels of requests: names and values by which a customer divides usage, such as team=search.

A project lists the names that its requests may carry. A request's labels are one text, their
canonical form: `feature=chat,team=search`, in the order of the names. The empty set is None.
"""

import re
from collections.abc import Iterable, Mapping

from core.errors import BadRequest

MOST_KEYS = 5  # of a project
LONGEST_KEY, LONGEST_VALUE = 24, 64
LONGEST = MOST_KEYS * (LONGEST_KEY + LONGEST_VALUE + 2)  # characters of a canonical form
OTHER = "other"  # the value of labels beyond the number that is counted apart
HEADER = "x-tollhouse-labels"
_KEY = re.compile(r"[a-z][a-z0-9_-]{0,23}")
_REFUSED = frozenset(",=")


def check_keys(keys: Iterable[str]) -> list[str]:
    """The names in order, each once. BadRequest with the first that is wrong."""
    found = sorted(set(keys))
    for key in found:
        if not _KEY.fullmatch(key):
            raise BadRequest(
                f"The label {key[:40]!r} is not a name.",
                next_step=f"Use 1 to {LONGEST_KEY} lower-case letters, digits, _ and -, a letter first.",
                param="label_keys",
            )
    if len(found) > MOST_KEYS:
        raise BadRequest(
            f"A project has at most {MOST_KEYS} labels, not {len(found)}.",
            next_step="Leave out those by which nothing is counted.",
            param="label_keys",
        )
    return found


def parse_header(text: str) -> dict[str, str]:
    """`team=search, feature=chat` as names and values."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key in found:
            raise BadRequest(
                f"{HEADER} is {text[:80]!r}, which is not a list of labels.",
                next_step="Write team=search,feature=chat, each name once.",
                param=HEADER,
                code="invalid_value",
            )
        found[key] = value
    return found


def canonical(labels: Mapping[str, str], param: str) -> str | None:
    """The canonical form. BadRequest for a value that it cannot hold."""
    for key, value in labels.items():
        fits = 0 < len(value) <= LONGEST_VALUE and value.isprintable()
        if not fits or value != value.strip() or not _REFUSED.isdisjoint(value):
            raise BadRequest(
                f"The label {key} has the value {value[:80]!r}.",
                next_step=f"Use 1 to {LONGEST_VALUE} printable characters without comma and =.",
                param=param,
                code="invalid_value",
            )
    return write(labels) or None


def write(labels: Mapping[str, str]) -> str:
    """Names and values that were checked, in the canonical form."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))


def read(text: str | None) -> dict[str, str]:
    """The names and values of a canonical form."""
    parts = [part.partition("=") for part in text.split(",")] if text else []
    return {key: value for key, _, value in parts}


def has(text: str | None, label: str) -> bool:
    """Whether a canonical form has this label, such as `team=search`."""
    return text is not None and label in text.split(",")


def check_label(label: str, param: str) -> str:
    """A label as limits, budgets and filters name it."""
    key, equals, value = label.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise BadRequest(
            f"{label[:80]!r} is not a label.",
            next_step="Write name=value, such as team=search.",
            param=param,
            code="invalid_value",
        )
    canonical({key: value}, param)
    return label
