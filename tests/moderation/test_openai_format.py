"""The answer of /v1/moderations against OpenAI's own document; images are refused, never zero."""

from typing import Any

import jsonschema
import pytest

from moderation.categories import OPENAI_CATEGORIES
from moderation.errors import NotScored
from moderation.openai_format import moderate, read_inputs
from moderation.screener import Screener
from tests.moderation.helpers import WordClassifier
from tests.openai_document import openai_document

SCREENER = Screener(WordClassifier(violence="poison", hate="vermin"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = openai_document()["components"]["schemas"]["CreateModerationResponse"]
    return found


def test_the_answer_fits_openais_schema(schema: dict[str, Any]) -> None:
    answer = {"id": "modr-1", **moderate(SCREENER, ["hello", "poison the well"])}
    jsonschema.validate(answer, schema)
    assert [each["flagged"] for each in answer["results"]] == [False, True]
    assert answer["results"][1]["categories"]["violence"] is True
    assert set(answer["results"][0]["category_scores"]) == set(OPENAI_CATEGORIES)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([{"type": "text", "text": "a"}], ["a"]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["a\nb"]),
    ],
)
def test_every_form_of_text_is_read(given: object, texts: list[str]) -> None:
    assert read_inputs(given) == texts


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://x/y.png"}}], "image"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], r"input\[1\] is an image"),
        ([], "string"),
        (None, "string"),
        (7, "string"),
        ([7], r"input\[0\]"),
        ([{"type": "text"}], "text part"),
        (["a"] * 3_000, "at most"),
    ],
)
def test_what_cannot_be_scored_is_refused(given: object, says: str) -> None:
    with pytest.raises(NotScored, match=says):
        moderate(SCREENER, given)


def test_without_a_classifier_nothing_is_scored_as_zero() -> None:
    with pytest.raises(NotScored, match="classifier"):
        moderate(Screener(), "hello")
