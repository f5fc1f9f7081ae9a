"""Llama Guard 3 and 4: one question, 'safe' or 'unsafe' and the hazard codes (MLCommons).

The prompt is a raw completion in the layout that the model is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moderation.guards.base import InvalidGuardOutput, Opinion, escape_special_tokens

_HAZARDS: Final = {
    "S1": ("Violent Crimes", ("violence", "illicit/violent")),
    "S2": ("Non-Violent Crimes", ("illicit",)),
    "S3": ("Sex-Related Crimes", ("sexual", "illicit")),
    "S4": ("Child Sexual Exploitation", ("sexual/minors", "sexual")),
    "S5": ("Defamation", ("harassment",)),
    "S6": ("Specialized Advice", ()),
    "S7": ("Privacy", ("illicit",)),
    "S8": ("Intellectual Property", ()),
    "S9": ("Indiscriminate Weapons", ("illicit/violent", "illicit")),
    "S10": ("Hate", ("hate",)),
    "S11": ("Suicide & Self-Harm", ("self-harm",)),
    "S12": ("Sexual Content", ("sexual",)),
    "S13": ("Elections", ()),
    "S14": ("Code Interpreter Abuse", ("illicit",)),
}
_SURE: Final = 0.97
_SPEAKERS: Final = {"assistant": "Agent"}


@dataclass(frozen=True, slots=True)
class LlamaGuard:
    name: str = "llama-guard"
    uses_chat_template: bool = False

    def questions(self, text: str, role: str) -> Sequence[str]:
        speaker = _SPEAKERS.get(role, "User")
        hazards = "\n".join(f"{code}: {title}." for code, (title, _) in _HAZARDS.items())
        return [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
            f"Task: Check if there is unsafe content in '{speaker}' messages in conversations "
            "according our safety policy with the below categories.\n\n"
            f"<BEGIN UNSAFE CONTENT CATEGORIES>\n{hazards}\n<END UNSAFE CONTENT CATEGORIES>\n\n"
            f"<BEGIN CONVERSATION>\n\n{speaker}: {escape_special_tokens(text)}\n\n<END CONVERSATION>\n\n"
            f"Provide your safety assessment for ONLY THE LAST {speaker} message in the above "
            "conversation:\n - First line must read 'safe' or 'unsafe'.\n - If unsafe, a second "
            "line must include a comma-separated list of violated categories."
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        ]

    def read(self, answers: Sequence[str]) -> Opinion:
        lines = answers[0].strip().splitlines()
        verdict = lines[0].strip().lower() if lines else ""
        if verdict == "safe":
            return Opinion()
        if verdict != "unsafe":
            raise InvalidGuardOutput("Llama Guard answered neither safe nor unsafe")
        codes = [code.strip().upper() for code in lines[1].split(",")] if len(lines) > 1 else []
        found = {name for code in codes for name in _HAZARDS.get(code, ("", ()))[1]}
        known = all(code in _HAZARDS for code in codes) and bool(codes)
        # "unsafe" without a known hazard code must not count as safe.
        return Opinion(dict.fromkeys(found if known else found | {"illicit"}, _SURE))
