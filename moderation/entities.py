"""Recognisers of personal data and secrets, each with an RE2 pattern, a validator and a head.

The head (stdlib `re`, anchored at the end) matches text that could still grow into the entity.
Ordinary words of a stream are released at once; only an unfinished number or address is held.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from moderation import validators
from moderation.patterns import PatternMatcher
from moderation.verdict import Action

# An unfinished word: any entity without spaces may grow from it.
_WORD_HEAD: Final = r"[^\s,;\"'<>()\[\]{}]+\Z"
_NUMBER_HEAD: Final = r"[+(0-9][0-9 \t().\-]*\Z"
_IBAN_HEAD: Final = r"\b[A-Z]{2}[0-9]{2}[A-Z0-9 \t]*\Z|\b[A-Z]{1,2}[0-9]?\Z"
_PEM_HEAD: Final = (
    r"(?:-----BEGIN [A-Z0-9 ]{1,60}-----[A-Za-z0-9+/=\s\-]*"
    r"|-----BEGIN[A-Z0-9 ]{0,60}-{0,5}|-{1,5}(?:B|BE|BEG|BEGI|BEGIN)?)\Z"
)

# What `PatternMatcher.hold` looks at before it searches for a head, as its fields are named.
_LOOKS: Final[Mapping[str, Mapping[str, Any]]] = {
    _WORD_HEAD: {"head_ends": frozenset(",;\"'<>()[]{}")},
    _NUMBER_HEAD: {"head_of": "+(0123456789 \t).-"},
    _IBAN_HEAD: {"head_of": "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \t"},
    _PEM_HEAD: {"head_from": "-"},
}
_DIGITS: Final = tuple("0123456789")


@dataclass(frozen=True, slots=True)
class Recogniser:
    """How one kind of entity is found. `longest` is in characters; every match contains at least
    one of `needs`, and a match of the pattern `part`, which must not backtrack."""

    kind: str
    name: str
    source: str
    accepts: Callable[[str], bool] | None = None
    longest: int = 64
    head: str = _WORD_HEAD
    needs: tuple[str, ...] = _DIGITS
    part: str = ""


RECOGNISERS: Final = (
    Recogniser(
        "email",
        "email",
        r"\b[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9\-]{1,63}\.){1,4}[A-Za-z]{2,24}\b",
        validators.is_email,
        longest=128,
        needs=("@",),
    ),
    Recogniser(
        "card",
        "luhn",
        r"\b[0-9](?:[ \t\-]{0,3}[0-9]){12,18}\b",
        validators.is_card,
        longest=76,
        head=_NUMBER_HEAD,
        part=r"[0-9](?:[ \t\-]{0,3}[0-9]){12}",
    ),
    Recogniser(
        "iban",
        "mod97",
        r"\b[A-Z]{2}[0-9]{2}(?:[ \t]{0,3}[A-Z0-9]{4}){2,7}(?:[ \t]{0,3}[A-Z0-9]{1,4})?\b",
        validators.is_iban,
        longest=64,
        head=_IBAN_HEAD,
        part=r"[A-Z]{2}[0-9]{2}",
    ),
    Recogniser(
        "us_ssn",
        "ssn",
        r"\b[0-9]{3}[ \t\-]{1,3}[0-9]{2}[ \t\-]{1,3}[0-9]{4}\b",
        validators.is_us_ssn,
        longest=16,
        head=_NUMBER_HEAD,
        part=r"[0-9]{3}[ \t\-]{1,3}[0-9]{2}[ \t\-]{1,3}[0-9]",
    ),
    Recogniser(
        "phone",
        "e164",
        r"(?:\+[0-9]{1,3}[ .\-]?)?(?:\([0-9]{1,4}\)[ .\-]?)?"
        r"\b[0-9]{2,4}(?:[ .\-]?[0-9]{2,4}){1,4}\b",
        validators.is_phone,
        longest=32,
        head=_NUMBER_HEAD,
    ),
    Recogniser(
        "ip",
        "v4",
        r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b",
        validators.is_ip,
        longest=16,
        part=r"[0-9]\.[0-9]",
    ),
    Recogniser(
        "ip",
        "v6",
        r"\b[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7}\b",
        validators.is_ip,
        longest=40,
        needs=(":",),
    ),
    Recogniser(
        "api_key",
        "vendor",
        r"\b(?:sk-(?:ant-|proj-|or-|svcacct-)?[A-Za-z0-9_\-]{20,180}|th_[A-Za-z0-9_\-]{20,80}"
        r"|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36,80}|github_pat_[A-Za-z0-9_]{22,100}"
        r"|glpat-[A-Za-z0-9_\-]{20,40}|xox[abeoprs]-[A-Za-z0-9\-]{10,120}|AIza[A-Za-z0-9_\-]{35}"
        r"|(?:sk|rk|pk|whsec)_(?:live|test)_[A-Za-z0-9]{16,120}|whsec_[A-Za-z0-9]{24,80}"
        r"|hf_[A-Za-z0-9]{30,60}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_\-]{40,180}"
        r"|SG\.[A-Za-z0-9_\-]{16,40}\.[A-Za-z0-9_\-]{30,60}|dop_v1_[a-f0-9]{64}"
        r"|gsk_[A-Za-z0-9]{40,60}|r8_[A-Za-z0-9]{30,50}|xai-[A-Za-z0-9]{40,90}"
        r"|eyJ[A-Za-z0-9_\-]{10,100}\.eyJ[A-Za-z0-9_\-]{10,200}\.[A-Za-z0-9_\-]{10,120})",
        validators.looks_random,
        longest=440,
        needs=("-", "_", "AKIA", "ASIA", "AIza", "SG.", "eyJ"),
    ),
    Recogniser(
        "private_key",
        "pem",
        r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:\s*[A-Za-z0-9+/=]{16,80})*"
        r"(?:(?:\s*[A-Za-z0-9+/=]{1,80})?\s*-----END [A-Z0-9 ]{1,40}-----)?",
        longest=8_192,
        head=_PEM_HEAD,
        needs=("-----BEGIN",),
    ),
)


@lru_cache(maxsize=256)
def _matcher(recogniser: Recogniser, action: Action) -> PatternMatcher:
    return PatternMatcher(
        recogniser.name,
        recogniser.source,
        action,
        category=recogniser.kind,
        longest=recogniser.longest,
        accepts=recogniser.accepts,
        head=re.compile(recogniser.head),
        needs=recogniser.needs,
        part=re.compile(recogniser.part) if recogniser.part else None,
        **_LOOKS[recogniser.head],
    )


def entity_matchers(actions: Mapping[str, Action]) -> tuple[PatternMatcher, ...]:
    """Return a matcher for every recogniser whose kind has an action above allow."""
    return tuple(
        _matcher(recogniser, actions[recogniser.kind])
        for recogniser in RECOGNISERS
        if actions.get(recogniser.kind, Action.ALLOW) > Action.ALLOW
    )
