"""Trains, calibrates and packs the classifier that ships. Run it from the repository's root:

    python -m moderation.classifiers.train --data FOLDER

FOLDER (or TOLLHOUSE_MODERATION_DATA) holds the labelled sets that the model card names. One
thread, about ten minutes. Seeded: the same data and library versions give the same weights.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moderation.categories import HEADS
from moderation.classifiers import train_convolution as convolution
from moderation.classifiers.ensemble import Ensemble
from moderation.classifiers.train_card import measure, write_card
from moderation.classifiers.train_linear import fit_head, matrix
from moderation.classifiers.train_pairs import pair_examples
from moderation.classifiers.train_sources import ANY, SAFE, Example, read_sets, read_terms
from moderation.classifiers.train_split import is_check, is_validation, normal_form
from moderation.classifiers.train_synthetic import composites, synthetic_examples, windowed
from moderation.classifiers.train_vectors import unlabelled, word_vectors
from moderation.normalise import fold
from moderation.scoring import WINDOW

Arrays = dict[str, NDArray[Any]]

OUTPUTS = (*HEADS, ANY)
WEIGHTS = Path(__file__).with_name("weights")
_STRENGTH = 6.0
_LINEAR_SHARE = 0.55
_COMPOSITES = 14_000


def read_examples(data: Path) -> list[Example]:
    """Read all labelled sets and synthetic sentences, folded, one row per normalised text."""
    found: dict[str, Example] = {}
    made = [*synthetic_examples(read_terms(data)), *pair_examples()]
    for example in [*read_sets(data), *made]:
        key = normal_form(example.text)
        if key:
            text = fold(example.text).text
            found.setdefault(key, Example(text, example.labels, example.source, example.weight))
    return list(found.values())


def split(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Return training and validation examples."""
    kept = [e for e in examples if not is_validation(e.text)]
    return kept, [e for e in examples if is_validation(e.text)]


def fit_linear(examples: list[Example]) -> Arrays:
    features = matrix([example.text for example in examples])
    weights = np.array([example.weight for example in examples], dtype=np.float32)
    columns = []
    for head in OUTPUTS:
        labels = np.array([e.labels.get(head, np.nan) for e in examples], dtype=np.float32)
        columns.append(fit_head(features, labels, weights, _STRENGTH))
        print(f"  linear: {head}", flush=True)
    stacked = np.stack(columns, axis=1)
    return {"linear": stacked[:-1], "linear_bias": stacked[-1]}


def fit_convolution(examples: list[Example], data: Path, epochs: int, seed: int) -> Arrays:
    texts = [*unlabelled(data), *(each.text for each in examples if each.source != "composite")]
    start = word_vectors(texts, convolution.DIMENSIONS, seed)
    fitted = convolution.fit(examples, OUTPUTS, epochs, seed, start)
    words = "\n".join(fitted.vocabulary.words).encode()
    return {**convolution.arrays(fitted), "vocabulary": np.frombuffer(words, dtype=np.uint8)}


def packed(name: str, values: NDArray[Any]) -> Arrays:
    """Store the linear weights in half precision and other large arrays as scaled bytes."""
    if values.dtype == np.uint8 or values.size < 4_096:
        return {name: values}
    if name == "linear":
        return {name: values.astype(np.float16)}
    scale = np.maximum(np.abs(values).max(0) / 127, 1e-8).astype(np.float32)
    whole = np.clip(np.rint(values / scale), -127, 127).astype(np.int8)
    return {name: whole, f"{name}_scale": scale}


def calibrate(logits: NDArray[np.float32], examples: Sequence[Example]) -> Arrays:
    """Fit a slope and an offset per head (Platt) on the rows whose label is known."""
    from sklearn.linear_model import LogisticRegression

    slopes, offsets = [], []
    for place, head in enumerate(OUTPUTS):
        labels = np.array([e.labels.get(head, np.nan) for e in examples])
        known = ~np.isnan(labels)
        weights = np.array([e.weight for e in examples])[known]
        model = LogisticRegression(C=100.0)
        model.fit(logits[known, place : place + 1], labels[known] > 0.5, weights)
        slopes.append(max(0.2, float(model.coef_[0, 0])))
        offsets.append(float(model.intercept_[0]))
    return {"slopes": np.array(slopes, np.float32), "offsets": np.array(offsets, np.float32)}


def train(data: Path, out: Path, epochs: int, seed: int, held_out: set[str]) -> Path:
    random.seed(seed)
    examples = read_examples(data)
    training, validation = split([e for e in examples if e.source not in held_out])
    measured = [e for e in examples if e.source in held_out] if held_out else validation
    training = windowed(training)
    training = training + composites(training, _COMPOSITES)
    print(f"{len(training)} training and {len(validation)} validation texts", flush=True)
    with ProcessPoolExecutor(2) as pool:
        linear = pool.submit(fit_linear, training)
        curved = pool.submit(fit_convolution, training, data, epochs, seed)
        arrays = {**linear.result(), **curved.result()}
    stored: Arrays = {"share": np.array([_LINEAR_SHARE], np.float32)}
    for name, values in arrays.items():
        stored |= packed(name, values)
    plain = {"slopes": np.ones(len(OUTPUTS)), "offsets": np.zeros(len(OUTPUTS))}
    raw = Ensemble({**stored, **plain}, "uncalibrated")
    # The everyday check set stays unseen by the calibration too.
    calibrating = [e for e in validation if not (e.labels == SAFE and is_check(e.text))]
    halves = [raw.halves([example.text[:WINDOW]]) for example in calibrating]
    logits = np.concatenate(
        [_LINEAR_SHARE * one + (1 - _LINEAR_SHARE) * other for one, other in halves]
    )
    stored |= calibrate(logits, calibrating)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "moderation.npz"
    np.savez_compressed(path, **stored)  # type: ignore[arg-type]
    write_card(out / "card.json", measure(Ensemble.load(path), measured), examples, held_out)
    print(f"wrote {path}: {path.stat().st_size / 1e6:.2f} MB", flush=True)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("TOLLHOUSE_MODERATION_DATA", "../shared/moderation-data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hold-out", nargs="*", default=[], help="sources kept for validation")
    chosen = parser.parse_args(arguments)
    if not chosen.data.is_dir():
        print(f"{chosen.data} is not a folder; set --data or TOLLHOUSE_MODERATION_DATA")
        return 2
    path = train(chosen.data, chosen.out, chosen.epochs, chosen.seed, set(chosen.hold_out))
    print(json.loads((path.parent / "card.json").read_text())["metrics"]["overall"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
