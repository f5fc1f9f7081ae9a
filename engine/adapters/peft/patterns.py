"""`rank_pattern` and `alpha_pattern`: regular expressions of module names, from a tenant's file.

They run on RE2, in linear time. Python's `re` may take for ever on one, and no other thread of the
engine runs meanwhile. No torch: gateways check uploads with it. RE2 is imported by the first pattern.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re2

FIELDS = ("rank_pattern", "alpha_pattern")
MAX_PATTERNS = 4_096
MAX_LENGTH = 512  # characters of a pattern
# Of RE2's programs of all patterns that are not plain names: bounds the time of a module's look-up.
MAX_PROGRAM = 4_000
_MEMORY_BYTES = 1 << 20
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.]+")


def problem_of(config: dict[str, Any]) -> str:
    """What is wrong with the patterns of an `adapter_config.json`, with the field's name; or ""."""
    for field in FIELDS:
        patterns = config.get(field)
        if patterns is None:
            continue
        if not isinstance(patterns, dict):
            return f"{field} is a {type(patterns).__name__}: it must be an object of numbers"
        if len(patterns) > MAX_PATTERNS:
            return f"{field} has {len(patterns)} patterns: at most {MAX_PATTERNS} are supported"
        program = 0
        for source, value in patterns.items():
            problem = _problem(field, source, value)
            if problem:
                return f"{field} {problem}"
            if not _PLAIN.fullmatch(source):
                program += _compiled(source).programsize
        if program > MAX_PROGRAM:
            return (
                f"{field} takes {program} instructions of RE2, at most {MAX_PROGRAM} are supported: "
                "use fewer or simpler patterns, or names of modules"
            )
    return ""


def value_of(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """That of the first pattern which matches the module's name or its end, as in PEFT. The patterns
    have passed `problem_of`."""
    for source, value in (patterns or {}).items():
        if _compiled(source).fullmatch(module):
            return value
    return default


def _problem(field: str, source: str, value: Any) -> str:
    shown = repr(source if len(source) <= 60 else source[:57] + "...")
    if len(source) > MAX_LENGTH:
        return f"has the pattern {shown} of {len(source)} characters: at most {MAX_LENGTH}"
    if isinstance(value, bool) or not _VALUES[field](value):
        return f"gives {shown} the value {value!r}: it must be {_RULES[field]}"
    import re2

    try:
        _compiled(source)
    except re2.error as error:
        cause = error.args[0] if error.args else error
        reason = cause.decode(errors="replace") if isinstance(cause, bytes) else str(cause)
        return f"has the pattern {shown}, which RE2 does not take ({reason}): use names of modules"
    except UnicodeEncodeError:
        return f"has the pattern {shown} with a lone surrogate: use names of modules"
    return ""


@lru_cache(maxsize=2 * MAX_PATTERNS)
def _compiled(source: str) -> "re2._Regexp":
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_BYTES
    return re2.compile(rf"(.*\.)?({source})", options)


_VALUES: dict[str, Callable[[Any], bool]] = {
    "rank_pattern": lambda value: isinstance(value, int) and value >= 1,
    "alpha_pattern": lambda value: isinstance(value, int | float) and abs(value) <= 1e6,
}
_RULES = {
    "rank_pattern": "a whole number of at least 1",
    "alpha_pattern": "a number from -1000000 to 1000000",
}
