"""Rules for system blocks that change between requests: named kinds and a tenant's patterns."""

from collections.abc import Iterable

import re2

from gateway.prompts.prompt_order import Volatile

# The kinds that a tenant's `volatile` setting may name.
VOLATILE_PATTERNS = {
    "dates": r"\b(\d{4}-\d{2}-\d{2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{1,2}:\d{2}(:\d{2})?"
    r"|(?i:mon|tues|wednes|thurs|fri|satur|sun)day,? )",
    "ids": r"\b([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|[0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{24,64})\b",
    "documents": r"(?i)^\s*(<(documents?|context|retrieved|search_results)\b|\[(document|source) \d+)",
}


def volatile_rule(kinds: Iterable[str], patterns: Iterable[str] = ()) -> Volatile:
    """Combines named kinds and the tenant's RE2 patterns. Raises ValueError for an invalid one."""
    sources = []
    for kind in kinds:
        if kind not in VOLATILE_PATTERNS:
            known = ", ".join(sorted(VOLATILE_PATTERNS))
            raise ValueError(f"unknown kind of volatile block {kind!r}; known: {known}")
        sources.append(VOLATILE_PATTERNS[kind])
    try:
        compiled = [re2.compile(source) for source in (*sources, *patterns)]
    except re2.error as error:
        raise ValueError(f"a volatile pattern is not a valid RE2 expression: {error}") from None
    return lambda text: any(pattern.search(text) for pattern in compiled)
