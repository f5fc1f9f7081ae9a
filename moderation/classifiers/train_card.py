"""Measures a trained classifier on the validation split and writes the facts of its card."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from moderation.categories import HEADS, PROMPT_ATTACK
from moderation.classifiers.ensemble import Ensemble
from moderation.classifiers.train_sources import ANY, Example
from moderation.classifiers.train_synthetic import read_families
from moderation.scoring import WINDOW

_HARMS = [place for place, head in enumerate(HEADS) if head != PROMPT_ATTACK]
_FLAG_BUDGET, _BLOCK_BUDGET = 0.05, 0.01


def measure(model: Ensemble, validation: Sequence[Example]) -> dict[str, Any]:
    """Return average precision by head and over all, calibration error and thresholds."""
    scores = np.concatenate([model.score([example.text[:WINDOW]]) for example in validation])
    top = scores[:, _HARMS].max(1)
    anything = _labels(validation, ANY)
    benign = anything == 0
    harmful = anything == 1
    per_head = {
        head: _head(scores[:, place], _labels(validation, head), benign)
        for place, head in enumerate(HEADS)
    }
    known = benign | harmful
    at_benign = {
        f"{share:.0%}": float(np.quantile(top[benign], 1 - share)) for share in (0.05, 0.01)
    }
    return {
        "heads": per_head,
        "overall": {
            "average_precision_any": _average_precision(harmful[known], top[known]),
            "recall_at_5_percent_flagged": float((top[harmful] >= at_benign["5%"]).mean()),
            "recall_at_1_percent_flagged": float((top[harmful] >= at_benign["1%"]).mean()),
            "score_at_benign_share": at_benign,
            "benign": int(benign.sum()),
            "harmful": int(harmful.sum()),
        },
        "benign_flagged_by_source_at_5_percent": _by_source(
            validation, top, benign, at_benign["5%"]
        ),
        "check": measure_check(model),
    }


def measure_check(model: Ensemble) -> dict[str, float]:
    """Measure how harmful-sounding safe prompts rank against unsafe ones in `check.txt`.

    Returns the shares of safe prompts that are flagged when 70 and 80 % of the unsafe are caught.
    """
    rows = [(kinds[0], line) for _, kinds, lines in read_families("check.txt") for line in lines]
    top = model.score([line for _, line in rows])[:, _HARMS].max(1)
    unsafe = np.array([kind == "unsafe" for kind, _ in rows])
    caught = {share: np.quantile(top[unsafe], 1 - share) for share in (0.7, 0.8)}
    return {
        **{
            f"safe_flagged_at_{share:.0%}_caught": round(float((top[~unsafe] >= at).mean()), 3)
            for share, at in caught.items()
        },
        "average_precision": _average_precision(unsafe, top),
        "safe": int((~unsafe).sum()),
        "unsafe": int(unsafe.sum()),
    }


def _labels(examples: Sequence[Example], head: str) -> NDArray[np.float64]:
    return np.array([example.labels.get(head, np.nan) for example in examples])


def _average_precision(labels: NDArray[np.bool_], scores: NDArray[np.float32]) -> float:
    return round(float(average_precision_score(labels, scores)), 4)


def _head(
    scores: NDArray[np.float32], labels: NDArray[np.float64], benign: NDArray[np.bool_]
) -> dict[str, Any]:
    known = (labels == 0) | (labels == 1)
    return {
        "average_precision": _average_precision(labels[known] == 1, scores[known]),
        "positives": int((labels == 1).sum()),
        "calibration_error": _calibration_error(scores[known], labels[known] == 1),
        "score_at_1_percent_of_benign": round(float(np.quantile(scores[benign], 0.99)), 4),
        "score_at_0.2_percent_of_benign": round(float(np.quantile(scores[benign], 0.998)), 4),
    }


def _calibration_error(scores: NDArray[np.float32], truth: NDArray[np.bool_]) -> float:
    """Expected calibration error over ten equal bins."""
    bins = np.minimum((scores * 10).astype(int), 9)
    gaps = [
        abs(scores[bins == b].mean() - truth[bins == b].mean()) * (bins == b).mean()
        for b in range(10)
        if (bins == b).any()
    ]
    return round(float(sum(gaps)), 4)


def _by_source(
    validation: Sequence[Example],
    top: NDArray[np.float32],
    benign: NDArray[np.bool_],
    threshold: float,
) -> dict[str, float]:
    sources = np.array([example.source for example in validation])
    return {
        str(source): round(float((top[benign & (sources == source)] >= threshold).mean()), 3)
        for source in sorted(set(sources[benign]))
    }


def write_card(
    path: Path, metrics: dict[str, Any], examples: Sequence[Example], held_out: set[str]
) -> None:
    """Write the figures that `MODEL_CARD.md` explains."""
    card = {
        "heads": list(HEADS),
        "validation": "wholly held out: " + ", ".join(sorted(held_out))
        if held_out
        else "a tenth, by the digest of the normalised text",
        "texts_by_source": dict(sorted(Counter(example.source for example in examples).items())),
        "metrics": metrics,
    }
    path.write_text(json.dumps(card, indent=1, sort_keys=True) + "\n", encoding="utf-8")
