"""Pieces of an upstream's stream that come together give what they give one by one."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from gateway.answers.choices import ChoiceOutput
from gateway.answers.chunks import group_chunks, portions
from gateway.request.engine import Chunk, TextChunk
from moderation.guard import StreamGuard
from moderation.policy import default_policy
from moderation.screener import Screener

SCREENER = Screener()
CARD = "pay with 4111 1111 1111 1111 now "


class Guard:
    """Rules alone: what the classifier adds is judged at the same places."""

    blocked = False
    action: str | None = None
    cut_paid_by = "tenant"
    needs_second_opinion = undecided = False
    spare = 0

    def __init__(self) -> None:
        self._stream = StreamGuard(default_policy(), SCREENER)

    @property
    def held(self) -> int:
        return self._stream.held(0)

    @property
    def needed(self) -> int:
        return self._stream.needed(0)

    @property
    def cuts(self) -> Sequence[tuple[int, int]]:
        return self._stream.cuts(0)

    def clean(self, text: str, *, record: bool = False) -> str | None:
        return self._stream.clean(text, record=record)

    def feed(self, text: str, *, last: bool = False) -> str:
        return self._stream.feed(0, text).text

    def flush(self) -> str:
        return self._stream.finish(0).text

    async def decide(self) -> str:
        return ""

    def over(self) -> None:
        return


def output(chunks: Sequence[Chunk], cuts: Sequence[int]) -> ChoiceOutput:
    choice = ChoiceOutput(0, None, guard=Guard())
    start = 0
    for end in [*sorted(cuts), len(chunks)]:
        for run in group_chunks(chunks[start:end]):
            choice.feed_run(run)
        start = max(start, end)
        choice.take()
        choice.sent()
    return choice


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["a", "toll ", "4111", CARD, "\n", "gate"]), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_how_pieces_come_changes_neither_text_nor_count(texts: list[str], cuts: list[int]) -> None:
    chunks: list[Chunk] = [TextChunk("r", 0, text, 1) for text in texts]
    chunks.append(TextChunk("r", 0, "", 0, "stop"))
    one_by_one = output(chunks, range(len(chunks)))
    together = output(chunks, [cut for cut in cuts if cut <= len(chunks)])
    for choice in (one_by_one, together):
        assert "".join(choice.text) == "".join(texts)
        assert choice.delivered == choice.received == len("".join(texts))
        assert choice.finish_reason == "stop"


def test_only_plain_neighbours_of_one_choice_join() -> None:
    plain = [TextChunk("r", 0, "a", 1), TextChunk("r", 0, "b", 1)]
    other, told = TextChunk("r", 1, "c", 1), TextChunk("r", 1, "d", 1, logprobs={})
    last = TextChunk("r", 1, "", 0, "stop")
    assert list(group_chunks([*plain, other, told, last])) == [plain, [other], [told], [last]]


@given(st.lists(st.integers(0, 3_000), max_size=40))
def test_a_portion_is_small_or_one_chunk(sizes: list[int]) -> None:
    chunks: list[Chunk] = [TextChunk("r", 0, "a" * size, 1) for size in sizes]
    cut = list(portions(chunks))
    assert [chunk for portion in cut for chunk in portion] == chunks
    for portion in cut:
        assert len(portion) == 1 or sum(len(chunk.text) for chunk in portion) <= 1_000  # type: ignore[union-attr]


class Cutting(Guard):
    """Has removed the first character."""

    @property
    def cuts(self) -> Sequence[tuple[int, int]]:
        return ((0, 1),)


def test_pieces_that_come_together_have_their_places_for_later_log_probabilities() -> None:
    """What belongs to a removed character is found by its place in the whole text."""
    told = {"content": [{"token": "e", "logprob": -1.0, "bytes": None, "top_logprobs": []}]}
    choice = ChoiceOutput(0, None, guard=Cutting())
    choice.feed_run([TextChunk("r", 0, "ab", 1), TextChunk("r", 0, "cd", 1)])
    choice.feed_run([TextChunk("r", 0, "e", 1, logprobs=told)])
    choice.end("stop")
    delta = choice.take()
    assert delta is not None
    assert [each["content"][0]["token"] for each in delta.upstream_logprobs] == ["e"]
