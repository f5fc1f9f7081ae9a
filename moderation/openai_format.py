"""Scores in the format of OpenAI's /v1/moderations: thirteen categories, text only.

Sub-categories (those with a slash) are a head times a lexical cue and are weak. `/v1/models` and
the README say so, because the format has no field for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moderation.categories import OPENAI_CATEGORIES
from moderation.defaults import DEFAULT_ANNOTATE_AT
from moderation.errors import NotScored
from moderation.policy import Screen
from moderation.screener import Screener

MAX_INPUTS = 128


def read_inputs(given: object) -> list[str]:
    """Read `input`: a string, a list of strings, or the text parts of one message. Raises NotScored
    for an image."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or not given:
        raise NotScored(
            "input must be a string, a list of strings, or a list of text parts.", param="input"
        )
    if len(given) > MAX_INPUTS:
        raise NotScored(
            f"input has {len(given)} items; at most {MAX_INPUTS} are allowed.", param="input"
        )
    texts = [_text(item, f"input[{place}]") for place, item in enumerate(given)]
    # Parts form one message, as with OpenAI; strings are separate inputs.
    return texts if all(isinstance(item, str) for item in given) else ["\n".join(texts)]


def _text(item: object, place: str) -> str:
    if isinstance(item, str):
        return item
    kind = item.get("type") if isinstance(item, Mapping) else None
    if isinstance(item, Mapping) and kind == "text" and isinstance(item.get("text"), str):
        return str(item["text"])
    if kind == "image_url":
        raise NotScored(
            f"{place} is an image, and this classifier reads only text; it was not scored.",
            next_step="Send text, or use a moderation service that supports images.",
            param=place,
        )
    raise NotScored(f"{place} is neither a string nor a text part.", param=place)


def result(scores: Mapping[str, float], screen: Screen | None = None) -> dict[str, Any]:
    """Return one entry of `results`; a category is flagged at or above its annotate threshold."""
    thresholds = dict(DEFAULT_ANNOTATE_AT)
    for name, each in screen.categories.items() if screen is not None else ():
        if each.annotate is not None:
            thresholds[name] = each.annotate
    flags = {name: scores[name] >= thresholds[name] for name in OPENAI_CATEGORIES}
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": {name: round(scores[name], 6) for name in OPENAI_CATEGORIES},
        "category_applied_input_types": {name: ["text"] for name in OPENAI_CATEGORIES},
    }


def moderate(screener: Screener, given: object, screen: Screen | None = None) -> dict[str, Any]:
    """Return the response of a moderation request without its id: the model and the results."""
    texts = read_inputs(given)
    if screener.classifier is None:
        raise NotScored("No classifier is installed, so the input cannot be scored.")
    return {
        "model": screener.classifier.version,
        "results": [result(screener.score(text).scores, screen) for text in texts],
    }
