"""Finds the classifier that the project ships."""

from moderation.classifiers.base import Classifier


def load_classifier() -> Classifier | None:
    """Return the shipped classifier, or None where no weights are installed."""
    return None
