"""Groups and cuts an engine's chunks, so that no turn of the event loop grows with their number."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gateway.request.engine import Chunk, TextChunk

# Work of one turn of the event loop, in characters to screen: a millisecond or two.
_MOST_WORK = 1_000
_MOST_WAITING = 4_000
_WORK_OF_TOKEN = 20  # to detokenize and screen, as much as so many characters
_WORK_OF_LOGPROBS = 20


def group_chunks(chunks: list[Chunk]) -> Iterable[list[Chunk]]:
    """Groups consecutive plain text chunks of one choice; every other chunk is its own group."""
    return (chunks,) if len(chunks) == 1 else _groups(chunks)


def _groups(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    run: list[Chunk] = []
    for chunk in chunks:
        plain = isinstance(chunk, TextChunk) and chunk.plain
        if run and not (plain and run[0].choice == chunk.choice):
            yield run
            run = []
        run.append(chunk)
        if not plain:
            yield run
            run = []
    if run:
        yield run


def portions(chunks: list[Chunk]) -> Iterable[list[Chunk]]:
    """The chunks in order, as many at a time as one turn of the event loop can take; at least one."""
    return (chunks,) if len(chunks) == 1 else _portions(chunks)


def _portions(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    portion: list[Chunk] = []
    work = 0
    for chunk in chunks:
        added = work_of(chunk)
        if portion and work + added > _MOST_WORK:
            yield portion
            portion, work = [], 0
        portion.append(chunk)
        work += added
    if portion:
        yield portion


def is_large(run: Sequence[Chunk], waiting: int) -> bool:
    """Whether a group belongs in a thread; `waiting` is what it may complete, in characters."""
    return waiting > _MOST_WAITING or sum(map(work_of, run)) > _MOST_WORK


def tokens_of(chunk: Chunk) -> int:
    return chunk.count if isinstance(chunk, TextChunk) else len(chunk.tokens)


def take_tokens(chunks: Sequence[Chunk], left: int) -> list[Chunk]:
    """The chunks up to `left` tokens; the last one cut, unless it is text."""
    result: list[Chunk] = []
    for chunk in chunks:
        size = tokens_of(chunk)
        if size > left:
            if left and not isinstance(chunk, TextChunk):
                logprobs = chunk.logprobs[:left] if chunk.logprobs else None
                cut = replace(chunk, tokens=chunk.tokens[:left], logprobs=logprobs)
                result.append(replace(cut, finish_reason=None))
            return result
        result.append(chunk)
        left -= size
    return result


def work_of(chunk: Chunk) -> int:
    """In characters to screen. Each alternative of a token is text and a line of the answer, too."""
    if not isinstance(chunk, TextChunk):
        work = len(chunk.tokens) * _WORK_OF_TOKEN
        for listed in (chunk.logprobs or ()), (chunk.prompt_logprobs or ()):
            work += sum([1 + len(each.top) for each in listed]) * _WORK_OF_LOGPROBS
        return work
    entries = (chunk.logprobs or {}).get("content") or ()
    listings = sum([1 + len(each.get("top_logprobs") or ()) for each in entries])
    return chunk.characters + listings * _WORK_OF_LOGPROBS
