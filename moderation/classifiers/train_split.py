"""Divides the texts of the labelled sets into training, calibration and the everyday check set.

The share of a text depends only on the digest of its normalised words, so equal texts of two sets
are never on two sides, and a new set does not move texts of the others.
"""

import hashlib
import re

from moderation.normalise import fold

# Per hundred texts. Validation includes the check set; calibration does not.
_VALIDATION_SHARE = 10
_CHECK_FROM = 5


def normal_form(text: str) -> str:
    """The normal form by which two rows count as the same text."""
    return re.sub(r"\W+", " ", fold(text).text.lower()).strip()


def _share(text: str) -> int:
    digest = hashlib.sha256(normal_form(text).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100


def is_validation(text: str) -> bool:
    return _share(text) < _VALIDATION_SHARE


def is_check(text: str) -> bool:
    """Whether a harmless text of an everyday set belongs to the check set: neither trained on nor
    used for calibration."""
    return _CHECK_FROM <= _share(text) < _VALIDATION_SHARE
