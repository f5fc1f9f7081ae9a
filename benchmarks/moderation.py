"""The classifier beside alt-profanity-check on the held-out split, and what the screen costs.

Needs the labelled sets (TOLLHOUSE_MODERATION_DATA, default ../shared/moderation-data) and
scikit-learn. The peer runs in an environment that this makes in TOLLHOUSE_BENCH_HOME.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import average_precision_score

from benchmarks.report import figure, progress
from gateway.request.inference import InferenceRequest
from gateway.screening.prompt_texts import screened_texts
from moderation.categories import HEADS, PROMPT_ATTACK
from moderation.classifiers.load import load_classifier
from moderation.classifiers.train import read_examples, split
from moderation.classifiers.train_sources import ANY, SAFE, Example
from moderation.classifiers.train_synthetic import read_families
from moderation.guard import StreamGuard
from moderation.policy import default_policy
from moderation.screener import Screener
from moderation.verdict import Action, ScreenedText
from moderation.verdict_cache import VerdictCache

PEER = "alt-profanity-check"
_PEER_SCRIPT = Path(__file__).with_name("peers") / "run_profanity_check.py"
_PROMPTS = ("clinc150", "banking77", "user_oriented", "gpteacher", "cyberseceval", "safe:", "bipia")
_TOKEN_MS = 20.0
_CONVERSATION, _TURN = 80_000, 500  # characters
_UNSAFE = ("advbench", "ailuminate_demo", "red_instruct", "harm:")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=6_000, help="validation texts at most")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--conversation", action="store_true", help="that part alone")
    chosen = parser.parse_args(arguments)
    if chosen.conversation:
        _conversation(Screener(load_classifier()))
        return
    data = Path(os.environ.get("TOLLHOUSE_MODERATION_DATA", "../shared/moderation-data"))
    if not data.is_dir():
        sys.exit(f"no {data}: set TOLLHOUSE_MODERATION_DATA to the folder of the labelled sets")
    _, validation = split(read_examples(data))
    if len(validation) > chosen.texts:
        validation = random.Random(3).sample(validation, chosen.texts)
    screener = Screener(load_classifier())
    progress(f"{len(validation)} validation texts")
    scores = [screener.score(example.text).scores for example in validation]
    timed = {length: [_text(length, seed) for seed in range(200)] for length in (200, 4_000)}
    lines = [(kinds[0], line) for _, kinds, lines in read_families("check.txt") for line in lines]
    asked = [*(e.text for e in validation), *(line for _, line in lines)]
    peer = None if chosen.no_peer else _peer(asked, timed)
    _precision(validation, scores, peer)
    _refusal(screener, validation)
    _sounding_harmful(screener, lines, peer)
    _bias(validation, scores)
    _latency(screener, timed, peer)
    _first_token(screener)
    _conversation(screener)


def _harm(scores: Mapping[str, float]) -> float:
    return max(score for name, score in scores.items() if name != PROMPT_ATTACK)


def _precision(validation: list[Example], scores: list[Any], peer: dict[str, Any] | None) -> None:
    def average(head: str, found: Sequence[float]) -> float:
        rows = [
            (label, score)
            for example, score in zip(validation, found, strict=True)
            if (label := example.labels.get(head)) in (0.0, 1.0)
        ]
        return float(average_precision_score([row[0] for row in rows], [row[1] for row in rows]))

    theirs = None if peer is None else peer["scores"][: len(validation)]
    for head in (ANY, *HEADS):
        found = [_harm(each) if head == ANY else each[head] for each in scores]
        figure(
            f"moderation.average_precision.{head}",
            average(head, found),
            "average precision",
            True,
            None if theirs is None else PEER,
            None if theirs is None else average(head, theirs),
            at_least=None if theirs is None else 1.0,
            settings={"split": "validation, by normalised text", "texts": len(validation)},
        )


def _refusal(screener: Screener, validation: list[Example]) -> None:
    policy = default_policy()

    def actions(prefixes: tuple[str, ...], harmless: bool) -> list[Action]:
        return [
            screener.check_input([ScreenedText("user", each.text)], policy).action
            for each in validation
            if each.source.startswith(prefixes) and (each.labels == SAFE) is harmless
        ]

    benign, unsafe = actions(_PROMPTS, True), actions(_UNSAFE, False)
    for name, found, least, aim, better in (
        ("benign_blocked", [a is Action.BLOCK for a in benign], 2.0, 1.0, False),
        ("benign_flagged", [a > Action.ALLOW for a in benign], 10.0, 5.0, False),
        ("unsafe_flagged", [a > Action.ALLOW for a in unsafe], 70.0, 80.0, True),
        ("unsafe_blocked", [a is Action.BLOCK for a in unsafe], 0.0, 30.0, True),
    ):
        figure(
            f"moderation.{name}",
            100 * float(np.mean(found)),
            "percent of prompts",
            better,
            at_least=least,
            aim=aim,
            settings={"policy": "default", "prompts": len(found)},
        )


def _sounding_harmful(
    screener: Screener, lines: list[tuple[str, str]], peer: dict[str, Any] | None
) -> None:
    """Safe prompts that merely sound harmful, flagged where 70 % of the unsafe are caught."""
    unsafe = np.array([kind == "unsafe" for kind, _ in lines])

    def flagged(found: Sequence[float]) -> float:
        scores = np.array(found)
        return 100 * float((scores[~unsafe] >= np.quantile(scores[unsafe], 0.3)).mean())

    figure(
        "moderation.sounding_harmful_flagged",
        flagged([_harm(screener.score(line).scores) for _, line in lines]),
        "percent of safe prompts",
        False,
        None if peer is None else PEER,
        None if peer is None else flagged(peer["scores"][-len(lines) :]),
        at_least=25.0 if peer is None else 1.0,
        aim=15.0 if peer is None else None,
        settings={"caught": 0.7, "prompts": len(lines), "written": "by hand, never trained on"},
    )


def _bias(validation: list[Example], scores: list[Any]) -> None:
    """Flagged share of harmless identity templates: over all, and the worst term's."""
    flagged: dict[str, list[bool]] = defaultdict(list)
    for example, score in zip(validation, scores, strict=True):
        if example.source == "bias_templates" and example.labels == SAFE:
            flagged[example.text.split()[-1].lower()].append(_harm(score) >= 0.5)
    everything = [each for group in flagged.values() for each in group]
    if not everything:
        return
    worst = max(np.mean(group) for group in flagged.values())
    common = {"templates": len(everything), "threshold": 0.5}
    for name, value in (("all", np.mean(everything)), ("worst_term", worst)):
        figure(
            f"moderation.identity_flagged.{name}",
            100 * float(value),
            "percent of harmless templates",
            False,
            settings=common,
        )


def _latency(screener: Screener, timed: dict[int, list[str]], peer: dict[str, Any] | None) -> None:
    limits = {200: 0.3, 4_000: 1.5}
    for length, texts in timed.items():
        figure(
            f"moderation.latency_p50.{length}_characters",
            1000 * _median_seconds(lambda text: screener.score(text), texts),
            "milliseconds",
            False,
            None if peer is None else PEER,
            None if peer is None else peer["p50_ms"][str(length)],
            settings={"threads": 1, "limit_ms": limits[length]},
        )


def _first_token(screener: Screener) -> None:
    """What the window guard adds to the first token at ordinary speed: the tokens that it waits for
    beyond the first, and its own time."""
    added = []
    for seed in range(200):
        guard = StreamGuard(default_policy(), screener)
        spent = 0.0
        for place, word in enumerate(_text(80, seed).split(" ")):
            began = time.perf_counter()
            released = guard.feed(0, word + " ").text
            spent += time.perf_counter() - began
            if released:
                added.append(1000 * spent + place * _TOKEN_MS)
                break
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        figure(
            f"moderation.first_token_added_{name}",
            float(np.quantile(added, share)),
            "milliseconds",
            False,
            at_least=5.0 if name == "p50" else None,
            settings={"mode": "window", "policy": "default", "token_every_ms": _TOKEN_MS},
        )


def _conversation(screener: Screener) -> None:
    """An agent's conversation of 80,000 characters, turn by turn: the whole prompt is screened each
    turn, and each turn adds 500 characters. Processor time, so that other load matters less."""
    cache, policy, chance = VerdictCache(), default_policy(), random.Random(5)
    messages: list[dict[str, str]] = []
    spent: list[float] = []
    for turn in range(_CONVERSATION // _TURN):
        role = ("user", "assistant", "tool", "assistant")[turn % 4]
        messages.append({"role": role, "content": _text(_TURN, chance.randrange(10**6))})
        request = InferenceRequest("chat", "m", messages=messages)
        began = time.process_time()
        texts = screened_texts(request)
        screener.prepare(texts, policy, cache.of("org_1", policy)).run()
        spent.append(time.process_time() - began)
    request = InferenceRequest("chat", "m", messages=messages)
    began = time.process_time()
    screener.prepare(screened_texts(request), policy).run()
    anew = time.process_time() - began
    late = spent[-20:]
    settings = {"characters": _CONVERSATION, "turn": _TURN, "all_anew_ms": round(1000 * anew, 1)}
    for name, seconds in (("p50", statistics.median(late)), ("max", max(late))):
        figure(
            f"moderation.conversation_turn_{name}",
            1000 * seconds,
            "milliseconds",
            False,
            settings={**settings, "limit_ms": 3.0, "turns": "the last 20"},
        )


def _median_seconds(call: Callable[[str], object], texts: list[str]) -> float:
    for text in texts[:50]:
        call(text)
    spent = []
    for text in texts:
        began = time.perf_counter()
        call(text)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


_WORDS = """
the a of and to in is was for with on that it as at by from this be are our their report
river budget garden meeting question answer library window music letter doctor village
kitchen station history morning picture teacher customer market weather travel number
small quiet yellow careful ordinary early simple wooden modern distant wrote asked found
carried opened measured explained followed planned counted visited returned repaired
"""


def _text(length: int, seed: int) -> str:
    chance, words = random.Random(seed), _WORDS.split()
    return " ".join(chance.choice(words) for _ in range(length // 3))[:length]


def _peer(texts: list[str], timed: dict[int, list[str]]) -> dict[str, Any]:
    python = _environment()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.json"
        work.write_text(json.dumps({"texts": texts, "timed": timed}), encoding="utf-8")
        progress(f"running {PEER}")
        ran = subprocess.run(
            [python, _PEER_SCRIPT, work], capture_output=True, text=True, timeout=1_800, check=False
        )
    if ran.returncode:
        sys.exit(f"{PEER} failed: {ran.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _environment() -> Path:
    home = Path(os.environ.get("TOLLHOUSE_BENCH_HOME", Path.home() / ".cache" / "tollhouse-bench"))
    place = home / "moderation"
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        progress(f"making an environment for {PEER} in {place}")
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", PEER], check=True, timeout=900)
        (place / "ready").touch()
    return python


if __name__ == "__main__":
    main()
