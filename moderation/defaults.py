"""The default thresholds, by category, chosen on the validation split that the model card names.

Annotate: at most 5 % of benign prompts over all categories. Block: at most 1 %.
"""

from typing import Final

DEFAULT_ANNOTATE_AT: Final = {
    "sexual": 0.5,
    "sexual/minors": 0.3,
    "hate": 0.5,
    "hate/threatening": 0.4,
    "harassment": 0.6,
    "harassment/threatening": 0.5,
    "self-harm": 0.5,
    "self-harm/intent": 0.5,
    "self-harm/instructions": 0.5,
    "violence": 0.5,
    "violence/graphic": 0.5,
    "illicit": 0.5,
    "illicit/violent": 0.5,
    "prompt_attack": 0.6,
}

DEFAULT_BLOCK_AT: Final = {
    "sexual/minors": 0.6,
    "hate": 0.97,
    "hate/threatening": 0.9,
    "harassment/threatening": 0.95,
    "self-harm/instructions": 0.97,
    "violence": 0.98,
    "illicit": 0.98,
    "illicit/violent": 0.95,
}
