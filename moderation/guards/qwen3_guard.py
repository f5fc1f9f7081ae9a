"""Qwen3Guard-Gen: 'Safety: Safe | Unsafe | Controversial' and 'Categories: ...'.

The model's chat template contains the task, so the prompt is the text as a user turn.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moderation.guards.base import InvalidGuardOutput, Opinion, escape_special_tokens

_CATEGORIES: Final = {
    "violent": ("violence", "illicit/violent"),
    "non-violent illegal acts": ("illicit",),
    "sexual content or sexual acts": ("sexual",),
    "pii": (),
    "personally identifiable information": (),
    "suicide & self-harm": ("self-harm",),
    "unethical acts": ("harassment",),
    "politically sensitive topics": (),
    "copyright violation": (),
    "jailbreak": ("prompt_attack",),
    "none": (),
}
_SCORES: Final = {"safe": 0.0, "controversial": 0.6, "unsafe": 0.97}
_SAFETY = re.compile(r"^\s*Safety:\s*(Safe|Unsafe|Controversial)\b", re.IGNORECASE | re.MULTILINE)
_NAMED = re.compile(r"^\s*Categories:\s*(.+)$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Qwen3Guard:
    name: str = "qwen3-guard"
    uses_chat_template: bool = True

    def questions(self, text: str, role: str) -> Sequence[str]:
        return [escape_special_tokens(text)]

    def read(self, answers: Sequence[str]) -> Opinion:
        safety = _SAFETY.search(answers[0])
        if safety is None:
            raise InvalidGuardOutput("Qwen3Guard's answer has no line 'Safety: ...'")
        score = _SCORES[safety.group(1).lower()]
        if not score:
            return Opinion()
        named = _NAMED.search(answers[0])
        names = [name.strip().lower() for name in named.group(1).split(",")] if named else []
        found = {category for name in names for category in _CATEGORIES.get(name, ("illicit",))}
        return Opinion(dict.fromkeys(found or {"illicit"}, score))
