"""OpenAI's published OpenAPI document, read once by each process: parsing it takes half a second."""

from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

from tests.conftest import SPECS

FILE = SPECS / "openai-openapi.yaml"


def openai_document() -> dict[str, Any]:
    if not FILE.exists():
        pytest.skip(f"no OpenAPI document at {FILE}; TOLLHOUSE_SPECS_DIR names its folder")
    return _parsed()


def check(schema: str, value: Any) -> None:
    """The value is what the document's schema of this name asks for."""
    wanted = {
        "$ref": f"#/components/schemas/{schema}",
        "components": openai_document()["components"],
    }
    jsonschema.Draft202012Validator(wanted).validate(value)


@cache
def _parsed() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document: dict[str, Any] = yaml.load(FILE.read_text(), Loader=loader)
    return document
