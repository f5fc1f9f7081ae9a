"""The texts of tools are those of `json.dumps`."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.prompts.tool_lists import json_text

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([1e-7, 1e16, 2**64, -(2**63), 2**63, float("inf")])
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["null", "1e-7", ", ", '": "', "\ud800", "\x7f\x1f\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(values)
def test_the_text_is_that_of_the_standard_library(value: Any) -> None:
    assert json_text(value) == json.dumps(value, ensure_ascii=False)
