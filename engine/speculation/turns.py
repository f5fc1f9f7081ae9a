"""In which steps a kind of guess is considered: the less often while it is not worth it."""

_LONGEST = 15  # steps until it is considered again


class Turns:
    def __init__(self) -> None:
        self._wait, self._waited = 0, 0  # steps without: in all, and so far

    def is_due(self, rows: int) -> bool:
        """Whether this step considers it. rows: of the step; a sequence that decodes alone considers
        it in every step, because nobody else pays for that."""
        if self._waited < min(self._wait, rows - 1):
            self._waited += 1
            return False
        return True

    def was_worth(self, worth: bool) -> int:
        """What a step that considered it found. Returns how many steps passed since the last one."""
        steps, self._waited = 1 + self._waited, 0
        self._wait = 0 if worth else min(2 * self._wait + 1, _LONGEST)
        return steps
