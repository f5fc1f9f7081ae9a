"""Token counts of one response of an OpenAI-compatible server.

The server's own report counts. Without a plausible one, the model's tokenizer counts the text, and
without a tokenizer the text's bytes are an estimate. No count depends on how the server cuts its
output into chunks. Of an answer that the client did not receive whole, tokens are billed in
proportion to the characters that were delivered.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from core.events import Components, CountedBy
from engine.protocol import FinishReason
from gateway.request.engine import Job
from gateway.request.receipts import NO_PARTS, UpstreamReceipt

log = logging.getLogger("tollhouse.upstream")
CountTokens = Callable[[str], int]
_BY_UPSTREAM = CountedBy.UPSTREAM
BYTES_PER_TOKEN = 4  # of output without a report or a tokenizer; English text has about 4.5
_LARGEST = 2**31 - 1  # the columns of usage events are 32-bit integers
# Characters that are tokenized at once. The cut depends on the text alone, so that every chunking of
# a text has the same count.
_SEGMENT = 2048
_IN_ONE_TURN = 8 * _SEGMENT  # characters that the event loop tokenizes before it turns to others
_NO_CAP = 1 << 60
# Characters of a token in text that is certainly too long; English has about 4.5, tables up to 8.
_MOST_CHARACTERS = 8


class _Report(Struct, frozen=True):
    """A `usage` object; a number that is not a plausible count is 0."""

    prompt: int
    cached: int
    completion: int
    reasoning: int
    characters: int  # received when the report came, including those of reasoning
    parts: Components = NO_PARTS  # without reasoning


class UsageCounter:
    _visible = 0  # characters of text and tool calls
    _hidden = 0  # characters of reasoning
    _bytes = 0
    _counted = 0  # tokens that chunks have reported so far
    _pieces = 0  # events with text
    _next_count = 0  # characters at which the tokenizer counts again, where the cap is near
    _report: _Report | None = None

    def __init__(self, job: Job, count_tokens: CountTokens | None = None) -> None:
        self._job = job
        self._count_tokens = count_tokens
        self._limit = job.engine_request.sampling.max_tokens * (job.request.n or 1)
        # What the client asked for, of all choices. Reasoning does not count: some servers do not
        # apply it there.
        capped = job.request.max_tokens is not None and job.request.inputs is None
        self._cap = self._limit if capped else _NO_CAP
        self.cut = False  # the server went on beyond the cap
        self._texts: dict[tuple[int, str], list[str]] = {}  # by choice and field
        # Of these texts, (characters, tokens) of the segments that `beyond_cap` has counted.
        self._measured: dict[tuple[int, str], tuple[int, int]] = {}

    @property
    def received(self) -> bool:
        """Whether the server sent any output or a report."""
        return self._report is not None or self._bytes > 0

    @property
    def uncounted(self) -> int:
        """Characters that `receipt` tokenizes, about 0.1 ms for a thousand."""
        if self._count_tokens is None or self._reported() is not None:
            return 0
        return self._visible + self._hidden

    def add(self, choice: int, field: str, text: str, *, pieces: int = 1) -> None:
        """`pieces`: events that the text came in, each of at least a token."""
        if field == "reasoning":
            self._hidden += len(text)
        else:
            self._visible += len(text)
            self._pieces += pieces
        self._bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if self._count_tokens is not None:
            self._texts.setdefault((choice, field), []).append(text)

    def report(self, usage: Any, *, final: bool) -> None:
        """A `usage` object. Of several, the final one counts, else the largest: with several choices
        some servers report each choice alone."""
        if not isinstance(usage, dict):
            return
        found = _read(usage, self._visible + self._hidden)
        if self._job.request.inputs is not None:
            found = replace(found, completion=0, reasoning=0)  # embeddings have no output
        if final or self._report is None or found.completion >= self._report.completion:
            self._report = found

    def grown(self) -> int:
        """Tokens since the last call, roughly: what the held money must cover meanwhile."""
        known = self._report.completion if self._report is not None else 0
        estimate = -(-self._bytes // BYTES_PER_TOKEN)
        now = known if known > estimate else estimate
        if now > self._cap:
            now = max(self._counted, self._most())
        if now <= self._counted:
            return 0
        grown, self._counted = now - self._counted, now
        return grown

    def beyond_cap(self) -> int:
        """How many characters at the end of the text are certainly beyond the cap, for a server that
        ignores it; they are not counted any more."""
        if self._visible <= self._cap:
            return 0
        tokens = self._at_least()
        if tokens <= self._cap:
            return 0
        if not self.cut:
            self.cut = True
            name = self._job.engine_request.request_id
            log.warning("the upstream went on beyond max_tokens of %s; it is cut", name)
        return self._visible - self._visible * self._cap // tokens

    def drop(self, characters: int) -> None:
        """Of what `beyond_cap` said, so much was not delivered."""
        self._visible -= characters

    def _at_least(self) -> int:
        """Tokens of text and tool calls that the answer certainly has."""
        report = self._report
        reported = report.completion - report.reasoning if report is not None else 0
        if reported > self._cap and report is not None and self._plausible(report):
            return reported
        longest = self._visible // _MOST_CHARACTERS
        # One event is one token at almost every server; some cut their text into smaller ones.
        events = min(self._pieces, self._visible // BYTES_PER_TOKEN)
        return max(longest, events, self._tokenized())

    def _tokenized(self) -> int:
        """By the model's tokenizer, counted only where the cap may be reached. What one turn of the
        event loop has no time for counts as the longest tokens until the next call."""
        count_tokens = self._count_tokens
        if count_tokens is None or self._visible < self._next_count:
            return 0
        tokens, left = 0, _IN_ONE_TURN
        for key, pieces in self._texts.items():
            if key[1] == "reasoning":
                continue
            text = "".join(pieces)
            start, known = self._measured.get(key, (0, 0))
            while left > 0 and (cut := _cut(text, start)) is not None:
                known += count_tokens(text[start:cut])
                left -= cut - start
                start = cut
            self._measured[key] = start, known
            rest = len(text) - start
            if left > 0:
                left -= rest
                known += count_tokens(text[start:])
            else:
                known += rest // _MOST_CHARACTERS
            tokens += known
        self._next_count = self._visible + (max(1, self._cap - tokens) if left > 0 else 0)
        return tokens

    def _most(self) -> int:
        """Tokens that are billed at most: reasoning beyond the cap is the server's own count."""
        return self._cap + (self._report.reasoning if self._report is not None else 0)

    def receipt(self, reason: FinishReason) -> UpstreamReceipt:
        request, report = self._job.engine_request, self._report
        prompt = (report.prompt if report is not None else 0) or len(request.prompt)
        cached = min(prompt, report.cached) if report is not None else 0
        generated, counted_by = self._generated()
        if generated > self._cap:
            generated = min(generated, self._most())
        return UpstreamReceipt(
            request_id=request.request_id,
            namespace=request.namespace,
            adapter=request.adapter,
            prompt=prompt,
            cached=cached,
            computed=prompt - cached,
            unprocessed=0,
            generated=generated,
            delivered=generated,
            recomputed=0,
            discarded=0,
            finish_reason=reason,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            counted_by=counted_by,
            reasoning=(reasoning := self._reasoning(generated)),
            characters=self._visible + self._hidden,
            silent=0 if self._hidden else reasoning,
            parts=report.parts if report is not None else NO_PARTS,
        )

    def _generated(self) -> tuple[int, CountedBy]:
        if (reported := self._reported()) is not None:
            return reported, _BY_UPSTREAM
        if self._report is not None and self._report.characters:
            log.warning(
                "the usage reported for %s is not plausible: %d completion tokens for %d bytes",
                *(self._job.engine_request.request_id, self._report.completion, self._bytes),
            )
        if (count_tokens := self._count_tokens) is not None:
            texts = ["".join(pieces) for pieces in self._texts.values()]
            tokens = sum(count_tokens(part) for text in texts for part in _segments(text))
            return tokens, CountedBy.TOKENIZER
        return self._estimate(), CountedBy.ESTIMATE

    def _reported(self) -> int | None:
        """Output tokens by the server's report, if it has a plausible one."""
        report, received = self._report, self._visible + self._hidden
        if report is None or not self._plausible(report):
            return None
        if not received or report.characters >= received:
            return report.completion
        if not report.characters:
            return None
        return report.completion * received // report.characters  # more text came after the report

    def _plausible(self, report: _Report) -> bool:
        """A token has at least one byte, text has at least one token, and the server was sent a
        limit, which some do not apply to reasoning."""
        least = 1 if self._bytes else 0
        most = self._limit if self._limit > self._bytes else self._bytes
        most += report.reasoning
        return least <= report.completion <= most

    def _reasoning(self, generated: int) -> int:
        if self._report is not None and self._report.reasoning:
            return min(generated, self._report.reasoning)
        received = self._visible + self._hidden
        return generated * self._hidden // received if self._hidden else 0

    def _estimate(self) -> int:
        return -(-self._bytes // BYTES_PER_TOKEN)


def _segments(text: str) -> Iterator[str]:
    start = 0
    while (cut := _cut(text, start)) is not None:
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _cut(text: str, start: int) -> int | None:
    """Where the segment that begins at `start` ends; None while its end is not certain."""
    if len(text) - start < _SEGMENT:
        return None
    cut = text.rfind(" ", start + 1, start + _SEGMENT)
    return cut if cut > 0 else start + _SEGMENT


def _read(usage: dict[str, Any], characters: int) -> _Report:
    prompt_details = usage.get("prompt_tokens_details")
    details = usage.get("completion_tokens_details")
    completion = _number(usage, "completion_tokens")
    cached = _number(prompt_details, "cached_tokens") if prompt_details else 0
    reasoning = min(completion, _number(details, "reasoning_tokens")) if details else 0
    return _Report(
        _number(usage, "prompt_tokens"),
        cached,
        completion,
        reasoning,
        characters,
        _parts(usage, prompt_details, details),
    )


def _parts(usage: Mapping[str, object], given: Any, made: Any) -> Components:
    """`given` and `made` are the details of the two totals."""
    if not (given or made or "searches" in usage):
        return NO_PARTS
    return Components(
        cache_write_5m=_number(given, "cache_write_tokens"),
        cache_write_1h=_number(given, "cache_write_long_tokens"),
        audio_input=_number(given, "audio_tokens"),
        image_input=_number(given, "image_tokens"),
        audio_output=_number(made, "audio_tokens"),
        image_output=_number(made, "image_tokens"),
        search=_number(usage, "searches"),
        tool_call=_number(usage, "tool_calls"),
    )


def _number(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if type(value) is int and 0 <= value <= _LARGEST else 0
