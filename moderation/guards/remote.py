"""A remote moderation API in OpenAI's format; the callable posts a body, returns the response's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from moderation.categories import OPENAI_CATEGORIES
from moderation.guards.base import InvalidGuardOutput, Opinion


@dataclass(frozen=True, slots=True)
class RemoteModeration:
    model: str = "omni-moderation-latest"
    name: str = "remote"
    uses_chat_template: bool = False

    def questions(self, text: str, role: str) -> Sequence[str]:
        """Return one JSON body for POST /v1/moderations."""
        return [json.dumps({"model": self.model, "input": text})]

    def read(self, answers: Sequence[str]) -> Opinion:
        try:
            given = json.loads(answers[0])["results"][0]["category_scores"]
            scores = {
                name: float(given[name])
                for name in OPENAI_CATEGORIES
                if given.get(name) is not None  # older models omit `illicit`
            }
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidGuardOutput(
                f"the remote API's response is not in OpenAI's format ({type(error).__name__})"
            ) from None
        if not scores:
            raise InvalidGuardOutput("the remote API scored no known category")
        return Opinion(scores)
