"""The default thresholds by category, chosen on the validation split of the model card.

Annotate: at most 5 % of benign prompts over all categories. Block: at most 1 %.
"""

from typing import Final

DEFAULT_ANNOTATE_AT: Final = {
    "sexual": 0.5,
    "sexual/minors": 0.4,
    "hate": 0.7,
    "hate/threatening": 0.6,
    "harassment": 0.65,
    "harassment/threatening": 0.6,
    "self-harm": 0.4,
    "self-harm/intent": 0.4,
    "self-harm/instructions": 0.4,
    "violence": 0.5,
    "violence/graphic": 0.5,
    "illicit": 0.5,
    "illicit/violent": 0.5,
    "prompt_attack": 0.5,
}

DEFAULT_BLOCK_AT: Final = {
    "sexual/minors": 0.8,
    "hate": 0.95,
    "hate/threatening": 0.9,
    "harassment/threatening": 0.95,
    "self-harm/instructions": 0.95,
    "violence": 0.95,
    "illicit": 0.95,
    "illicit/violent": 0.95,
}
