"""Measures how many everyday texts the default policy flags and blocks. Run it from the repository's
root:

    TOLLHOUSE_MODERATION_DATA=FOLDER python -m moderation.classifiers.everyday

The texts are everyday, technical and support prompts and answers of the labelled sets in FOLDER,
all from the check share of `train_split`, and the sentences of `synthetic/everyday.txt`. None of
them is trained on or used for calibration.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moderation.classifiers.load import load_classifier
from moderation.classifiers.train_sources import json_lines, json_of, rows_of
from moderation.classifiers.train_split import is_check, normal_form
from moderation.policy import Policy, default_policy
from moderation.screener import Screener
from moderation.verdict import Action, ScreenedText

OWN = Path(__file__).with_name("synthetic") / "everyday.txt"
MOST_FLAGGED, MOST_BLOCKED = 0.02, 0.001
_LEAST_CHARACTERS = 8


def own_sentences() -> list[str]:
    """The sentences written for this project; never trained on."""
    lines = OWN.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def check_texts(data: Path) -> list[tuple[str, str]]:
    """(source, text) of the whole check set, each text once."""
    found: dict[str, tuple[str, str]] = {}
    for source, text in _benign(data):
        if len(text) >= _LEAST_CHARACTERS and is_check(text):
            found.setdefault(normal_form(text), (source, text))
    for text in own_sentences():
        found.setdefault(normal_form(text), ("own", text))
    return list(found.values())


def _benign(data: Path) -> Iterator[tuple[str, str]]:
    clinc = json_of(data / "clinc150" / "data_full.json")
    for name in ("train", "val", "test", "oos_train", "oos_val", "oos_test"):
        yield from (("clinc150", text) for text, _ in clinc[name])
    for row in rows_of(data / "banking77" / "train.csv"):
        yield "banking77", row["text"]
    for row in json_of(data / "gpteacher" / "codegen-instruct.json"):
        yield "gpteacher_code", f"{row['instruction']} {row['input']}".strip()
        yield "gpteacher_code_answers", row["response"]
    for row in json_lines(data / "gsm8k" / "train.jsonl"):
        yield "gsm8k", row["question"]
        yield "gsm8k_answers", row["answer"]
    for row in json_lines(data / "user_oriented" / "user_oriented_instructions.jsonl"):
        one = row["instances"][0]
        yield "user_oriented", f"{row['instruction']} {one['input']}".strip()
        yield "user_oriented_answers", one["output"]
    for row in json_of(data / "cyberseceval" / "instruct.json"):
        yield "cyberseceval_instruct", row["test_case_prompt"]
        yield "cyberseceval_code", row["origin_code"]
    for row in json_lines(data / "bipia" / "train.jsonl"):
        yield "bipia", row["context"]


def actions_of(screener: Screener, texts: Sequence[str], policy: Policy) -> list[Action]:
    return [screener.check_input([ScreenedText("user", text)], policy).action for text in texts]


def measure_everyday(screener: Screener, data: Path) -> dict[str, Any]:
    """The flagged and blocked shares, over all and by source, and the flagged categories."""
    rows, policy = check_texts(data), default_policy()
    actions = actions_of(screener, [text for _, text in rows], policy)
    flagged = [row for row, action in zip(rows, actions, strict=True) if action > Action.ALLOW]
    by_source = Counter(source for source, _ in rows)
    hits = Counter(source for source, _ in flagged)
    categories = Counter(
        name
        for _, text in flagged
        for name in screener.check_input([ScreenedText("user", text)], policy).flagged
    )
    return {
        "texts": len(rows),
        "flagged": round(len(flagged) / len(rows), 5),
        "blocked": round(sum(a is Action.BLOCK for a in actions) / len(rows), 5),
        "flagged_by_source": {
            name: round(hits[name] / count, 4) for name, count in sorted(by_source.items())
        },
        "flagged_by_category": dict(sorted(categories.items())),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("TOLLHOUSE_MODERATION_DATA", "../shared/moderation-data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, help="write the figures to this file as well")
    chosen = parser.parse_args(arguments)
    if not chosen.data.is_dir():
        sys.stderr.write(
            f"{chosen.data} is not a directory; set TOLLHOUSE_MODERATION_DATA or --data\n"
        )
        return 2
    found = measure_everyday(Screener(load_classifier()), chosen.data)
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if chosen.out is not None:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    passed = found["flagged"] <= MOST_FLAGGED and found["blocked"] <= MOST_BLOCKED
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
