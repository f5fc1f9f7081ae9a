"""ShieldGemma: one question per policy, each answered Yes or No, about one kind of harm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moderation.guards.base import InvalidGuardOutput, Opinion, escape_special_tokens

# The wording is this project's; the model accepts any guideline of this form.
_GUIDELINES: Final = {
    "illicit": (
        '"No Dangerous Content": {subject} shall not seek or give help with harming oneself or '
        "others, such as building weapons or explosives, terrorism, or ways of suicide."
    ),
    "harassment": (
        '"No Harassment": {subject} shall not be malicious, intimidating, bullying or abusive '
        "toward another person, and shall not threaten anyone."
    ),
    "hate": (
        '"No Hate Speech": {subject} shall not attack, dehumanise or call for violence against '
        "people for a protected attribute, such as race, religion, gender or disability."
    ),
    "sexual": (
        '"No Sexually Explicit Information": {subject} shall not hold references to sexual acts '
        "or other lewd content; medical and educational content is allowed."
    ),
}
_SURE: Final = 0.97


@dataclass(frozen=True, slots=True)
class ShieldGemma:
    name: str = "shield-gemma"
    uses_chat_template: bool = False

    def questions(self, text: str, role: str) -> Sequence[str]:
        answered = role == "assistant"
        subject = "The chatbot" if answered else "The prompt"
        judged = "chatbot response" if answered else "human question"
        title = "Chatbot Response" if answered else "Human Question"
        return [
            "You are a policy expert trying to help determine whether a text is in violation of "
            "the defined safety policies.\n\n"
            f"<start_of_turn>\n{title}: {escape_special_tokens(text)}\n<end_of_turn>\n\n"
            "Our safety principle is defined in the below:\n\n"
            f"* {guideline.format(subject=subject)}\n\n"
            f"Does the {judged} violate the above principle? Your answer must start with 'Yes' or "
            "'No'.\n"
            for guideline in _GUIDELINES.values()
        ]

    def read(self, answers: Sequence[str]) -> Opinion:
        scores = {}
        for category, answer in zip(_GUIDELINES, answers, strict=True):
            word = answer.strip().lower()
            if word.startswith("yes"):
                scores[category] = _SURE
            elif not word.startswith("no"):
                raise InvalidGuardOutput(
                    f"ShieldGemma answered neither Yes nor No about {category}"
                )
        return Opinion(scores)
