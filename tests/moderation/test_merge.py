"""The findings of several texts together are those that merging them one by one gives."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from moderation.categories import SCORED
from moderation.normalise import LOOSE, PLAIN
from moderation.screener import Findings, _merge
from moderation.verdict import Action, Span

SPANS = [Span(0, 1, 2, "email", "entity:email", Action.REDACT)]
quiet = st.builds(
    Findings, top=st.sampled_from([0.0, 0.1, 0.2, 0.9]), view=st.sampled_from([PLAIN, LOOSE])
)
loud = st.builds(
    Findings,
    spans=st.sampled_from([[], SPANS]),
    flagged=st.sampled_from([set(), {"violence"}]),
    unscanned=st.sampled_from([set(), {"classifier"}]),
    would=st.sampled_from(list(Action)),
    top=st.sampled_from([0.0, 0.2, 0.9]),
    view=st.sampled_from([PLAIN, LOOSE]),
    rows=st.lists(st.floats(0, 1).map(lambda each: dict.fromkeys(SCORED, each)), max_size=2),
)


@given(quiet | loud, st.lists(quiet | quiet | loud, max_size=6))
def test_it_is_that_of_one_by_one(begun: Findings, texts: list[Findings]) -> None:
    together, alone = begun.copy(), begun.copy()
    rows: list[Mapping[str, float]] = []
    _merge(together, rows, list(enumerate(texts)))
    for index, each in enumerate(texts):
        alone.merge(each, index)
    assert together == alone
    expected = [each.scores for each in texts if each.rows]
    assert bool(rows) is bool(expected)
    assert Findings(rows=rows).scores == Findings(rows=expected).scores
