"""Loads the classifier that the project ships."""

from functools import lru_cache
from pathlib import Path

from moderation.classifiers.base import Classifier
from moderation.classifiers.ensemble import Ensemble

SHIPPED = Path(__file__).with_name("weights") / "moderation.npz"


@lru_cache(maxsize=4)
def load_classifier(path: Path = SHIPPED) -> Classifier | None:
    """Return the classifier stored at `path`, loaded once, or None if there are no weights."""
    return Ensemble.load(path) if path.is_file() else None
