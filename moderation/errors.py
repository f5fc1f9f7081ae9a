"""Errors of policies and moderation calls."""

from core.errors import BadRequest


class BadPolicy(BadRequest):
    """An invalid policy document; nothing was stored."""

    code = "invalid_policy"


class BadPattern(BadPolicy):
    """A tenant's pattern that RE2 refuses or that matches everything."""

    code = "invalid_pattern"


class NotScored(BadRequest):
    """An input that no installed classifier can score, such as an image."""

    code = "input_not_scored"
