"""Sampling defaults that no request may set are refused with the field's name."""

import math
from typing import Any

import pytest

from core.errors import SettingError
from gateway.catalog.model_files import sampling_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("top_k", 0.5),
        ("top_k", 10**12), ("top_k", -5), ("top_p", 7), ("top_p", -1), ("min_p", 9),
        ("repetition_penalty", 0), ("repetition_penalty", -3), ("repetition_penalty", math.inf),
    ],
)  # fmt: skip
def test_a_default_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=name):
        sampling_of({name: value})


def test_usual_defaults_are_kept() -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}
    assert sampling_of(given) == given
