"""What of a text is held because a tool call may begin there."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.answers.tool_formats import FORMATS, parse_python, partial_opening

OPENINGS = [each.open for each in FORMATS]
PARTS = st.one_of(
    st.sampled_from([each[:end] for each in OPENINGS for end in range(len(each))]),
    st.text("<|[ab ", max_size=4),
)


@given(st.lists(PARTS, max_size=6).map("".join))
def test_the_longest_end_that_begins_an_opening_is_held(text: str) -> None:
    longest = max(map(len, OPENINGS)) - 1
    fitting = [
        length
        for length in range(1, min(longest, len(text)) + 1)
        if any(opening.startswith(text[-length:]) for opening in OPENINGS)
    ]
    assert partial_opening(text) == max(fitting, default=0)


def test_calls_in_pythons_form_are_parsed_up_to_a_bound() -> None:
    """Python's parser takes time and memory, and nobody writes such calls."""
    longest = "[f(a='" + "x" * (200_000 - 9) + "')]"
    assert len(longest) == 200_000 and len(parse_python(longest)) == 1
    assert parse_python(longest + " ") == []


def test_calls_in_pythons_form_take_objects_and_jsons_constants() -> None:
    (call,) = parse_python("[send(to={'name': 'Ada', 'urgent': true, 'tags': [null, 1]})]")
    given = {"to": {"name": "Ada", "urgent": True, "tags": [None, 1]}}
    assert call == {"name": "send", "arguments": given}


def test_an_object_that_takes_in_another_is_no_call() -> None:
    assert parse_python("[send(to={**other})]") == []
