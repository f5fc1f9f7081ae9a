"""What the output guard does to streams: how evenly text leaves, and what a token costs.

The everyday check set (`moderation.classifiers.everyday`; no text of it is trained on) is streamed
token by token, with the tokens of the demo model, through the guard of the default policy and without
it: each text as an answer, and the texts of each source joined to answers of some 2,000 characters.
Gaps are counted in tokens, not in seconds. The unsafe texts of the same sets tell how much of an
answer that is blocked has left before. CPU time is the least of some rounds. Needs the labelled sets
(TOLLHOUSE_MODERATION_DATA, default ../shared/moderation-data).

    python -m benchmarks.guarded_streams [--rounds 3] [--texts 2000]
"""

import argparse
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from tokenizers import Tokenizer

from benchmarks.report import figure, progress
from moderation.classifiers.compiled import is_compiled
from moderation.classifiers.everyday import check_texts
from moderation.classifiers.load import load_classifier
from moderation.classifiers.train import read_examples
from moderation.classifiers.train_sources import SAFE
from moderation.guard import StreamGuard
from moderation.policy import Policy, default_policy
from moderation.screener import Screener

_TOKENIZER = Path(__file__).parents[1] / "engine/demo/weights/tokenizer.json"
_JOINED = 2_000  # characters
_UNSAFE = ("advbench", "ailuminate_demo", "red_instruct", "harm:")


class Stream(Struct):
    """Of one answer: its pieces, and the numbers of those after which text left."""

    pieces: list[str]
    events: list[int]
    left: int = 0  # characters
    blocked: bool = False

    def gaps(self) -> Iterator[int]:
        before = -1
        for event in self.events:
            yield event - before
            before = event
        if before < len(self.pieces) - 1:
            yield len(self.pieces) - 1 - before


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of which the quickest counts")
    parser.add_argument("--texts", type=int, default=2_000, help="of the check set at most")
    chosen = parser.parse_args(arguments)
    data = Path(os.environ.get("TOLLHOUSE_MODERATION_DATA", "../shared/moderation-data"))
    if not data.is_dir():
        sys.exit(f"no {data}: set TOLLHOUSE_MODERATION_DATA to the folder of the labelled sets")
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    rows = check_texts(data)
    if len(rows) > chosen.texts:
        rows = random.Random(3).sample(rows, chosen.texts)
    screener, policy = Screener(load_classifier()), default_policy()
    for name, texts in (("alone", [text for _, text in rows]), ("joined", _joined(rows))):
        pieces = [_pieces(tokenizer, text) for text in texts]
        progress(f"{len(pieces)} answers {name}")
        _evenness(name, [_guarded(each, policy, screener) for each in pieces], policy)
        _cost(name, pieces, screener, policy, chosen.rounds)
    _blocked(data, tokenizer, screener, policy)


def _joined(rows: Sequence[tuple[str, str]]) -> list[str]:
    found: list[str] = []
    by_source: dict[str, list[str]] = defaultdict(list)
    for source, text in rows:
        by_source[source].append(text)
        if sum(map(len, by_source[source])) >= _JOINED:
            found.append("\n\n".join(by_source.pop(source)))
    return found


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The characters that each token completes."""
    ends = [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
    pieces, at = [], 0
    for end in [*ends, len(text)]:
        if end > at:
            pieces.append(text[at:end])
            at = end
    return pieces


def _guarded(pieces: list[str], policy: Policy, screener: Screener) -> Stream:
    guard = StreamGuard(policy, screener)
    stream = Stream(pieces, [])
    for number, piece in enumerate(pieces):
        release = guard.feed(0, piece)
        stream.left += len(release.text)
        if release.text:
            stream.events.append(number)
        if release.blocked:
            stream.blocked = True
            return stream
    release = guard.finish(0)
    stream.left += len(release.text)
    if release.text and stream.events[-1:] != [len(pieces) - 1]:
        stream.events.append(len(pieces) - 1)
    stream.blocked = release.blocked
    return stream


def _evenness(name: str, streams: list[Stream], policy: Policy) -> None:
    whole = [stream for stream in streams if not stream.blocked]
    settings = {
        "answers": len(streams),
        "blocked": len(streams) - len(whole),
        "tokens": sum(len(stream.pieces) for stream in whole),
        "policy": policy.name,
    }
    events = sum(len(stream.events) for stream in whole)
    figure(
        f"guarded_streams.{name}.events_per_token",
        events / sum(len(stream.pieces) for stream in whole),
        "events a token, 1 without a guard",
        True,
        at_least=0.95,
        aim=1.0,
        settings=settings,
    )
    first = [stream.events[0] for stream in whole]
    gaps = [gap for stream in whole for gap in stream.gaps()]
    for what, value in (
        ("first_token_later_p99", float(np.quantile(first, 0.99))),
        ("first_token_later_max", max(first)),
        ("gap_p99", float(np.quantile(gaps, 0.99))),
        ("gap_p999", float(np.quantile(gaps, 0.999))),
        ("gap_max", max(gaps)),
    ):
        figure(f"guarded_streams.{name}.{what}", value, "tokens", False, settings=settings)


def _cost(
    name: str, pieces: list[list[str]], screener: Screener, policy: Policy, rounds: int
) -> None:
    def spent() -> float:
        began = time.process_time()
        for answer in pieces:
            guard = StreamGuard(policy, screener)
            for piece in answer:
                guard.feed(0, piece)
            guard.finish(0)
        return time.process_time() - began

    tokens = sum(map(len, pieces))
    figure(
        f"guarded_streams.{name}.cpu_per_token",
        1e6 * min(spent() for _ in range(rounds)) / tokens,
        "microseconds",
        False,
        at_least=6.0,
        aim=3.0,
        settings={"tokens": tokens, "rounds": rounds, "compiled": is_compiled()},
    )


def _blocked(data: Path, tokenizer: Tokenizer, screener: Screener, policy: Policy) -> None:
    """Of unsafe texts in the place of answers."""
    unsafe = [
        each.text
        for each in read_examples(data)
        if each.source.startswith(_UNSAFE) and each.labels != SAFE
    ]
    streams = [_guarded(_pieces(tokenizer, text), policy, screener) for text in unsafe]
    blocked = [stream for stream in streams if stream.blocked]
    settings = {"texts": len(streams), "blocked": len(blocked)}
    shares = [stream.left / sum(map(len, stream.pieces)) for stream in blocked]
    for name, value, unit in (
        ("blocked", 100 * len(blocked) / len(streams), "percent of unsafe texts"),
        ("left_before_block_mean", float(np.mean([each.left for each in blocked])), "characters"),
        ("left_before_block_share", 100 * float(np.mean(shares)), "percent of a blocked text"),
    ):
        figure(f"guarded_streams.unsafe.{name}", value, unit, name == "blocked", settings=settings)


if __name__ == "__main__":
    main()
