"""What can be wrong with a policy or a call of this room."""

from core.errors import BadRequest


class BadPolicy(BadRequest):
    """A policy document that cannot be used; nothing of it was stored."""

    code = "invalid_policy"


class BadPattern(BadPolicy):
    """A tenant's pattern that RE2 refuses or that would match everything."""

    code = "invalid_pattern"


class NotScored(BadRequest):
    """An input that no classifier here can judge, such as an image."""

    code = "input_not_scored"
