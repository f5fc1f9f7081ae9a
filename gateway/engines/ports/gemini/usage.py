"""What Gemini's `usageMetadata` includes.

| field | of the canonical split |
|---|---|
| promptTokenCount | all input; `cachedContentTokenCount` of it is `cache_read` |
| toolUsePromptTokenCount | additional input, of the provider's own tools |
| candidatesTokenCount | `output`, without thoughts |
| thoughtsTokenCount | `reasoning`, and `output` in addition to the candidates |
| promptTokensDetails, candidatesTokensDetails | audio and image parts of the two |
| cacheTokensDetails | audio and image parts of what was cached, which are no parts of the input |

Writing a cache is not counted: what is cached without being asked for costs nothing to write.
"""

from typing import Any

from gateway.engines.ports.split import Split, count, split_of


def split_of_usage(usage: dict[str, Any], searches: int = 0) -> Split:
    thoughts = count(usage, "thoughtsTokenCount")
    prompt = count(usage, "promptTokenCount") + count(usage, "toolUsePromptTokenCount")
    given, made = usage.get("promptTokensDetails"), usage.get("candidatesTokensDetails")
    kept = usage.get("cacheTokensDetails")
    return split_of(
        prompt,
        read=count(usage, "cachedContentTokenCount"),
        output=count(usage, "candidatesTokenCount", "responseTokenCount") + thoughts,
        reasoning=thoughts,
        audio_input=max(0, of_modality(given, "AUDIO") - of_modality(kept, "AUDIO")),
        image_input=max(0, of_modality(given, "IMAGE") - of_modality(kept, "IMAGE")),
        audio_output=of_modality(made, "AUDIO"),
        image_output=of_modality(made, "IMAGE"),
        searches=searches,
    )


def of_modality(details: Any, modality: str) -> int:
    listed = details if isinstance(details, list) else []
    return sum(
        count(each, "tokenCount")
        for each in listed
        if isinstance(each, dict) and each.get("modality") == modality
    )
