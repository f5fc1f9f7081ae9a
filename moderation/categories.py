"""The categories of harm: the classifier's heads and OpenAI's thirteen categories."""

from typing import Final

HEADS: Final = (
    "sexual",
    "hate",
    "harassment",
    "self-harm",
    "violence",
    "illicit",
    "prompt_attack",
)

OPENAI_CATEGORIES: Final = (
    "harassment",
    "harassment/threatening",
    "sexual",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm/intent",
    "self-harm/instructions",
    "self-harm",
    "sexual/minors",
    "violence",
    "violence/graphic",
)

# Sub-categories are a head times a lexical cue; they are marked weak wherever they are shown.
WEAK_CATEGORIES: Final = frozenset(name for name in OPENAI_CATEGORIES if "/" in name)

PROMPT_ATTACK: Final = "prompt_attack"
SCORED: Final = (*OPENAI_CATEGORIES, PROMPT_ATTACK)

PII_KINDS: Final = ("email", "phone", "card", "iban", "us_ssn", "ip")
SECRET_KINDS: Final = ("api_key", "private_key")
ENTITY_KINDS: Final = (*PII_KINDS, *SECRET_KINDS)
# Accepted in stored policies, whose version is the digest of the document. Nothing detects them.
RETIRED_ENTITY_KINDS: Final = ("person", "location", "organisation", "date")
