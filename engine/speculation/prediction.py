"""Guesses by look-up where the client sent a text that its answer will mostly repeat."""

from engine.speculation.lookup import PromptLookup


class PredictedText:
    """Of one sequence: the predicted ids stand between its prompt and its output, and the output is
    expected to begin as they do. They are compared with the output, and never part of the prompt."""

    def __init__(
        self, history: list[int], prompt_len: int, prediction: list[int], most: int
    ) -> None:
        """most: ids of the prompt that are read, its last ones."""
        before = history[max(0, prompt_len - most) : prompt_len]
        self._text = before + prediction
        self._behind = prompt_len  # positions of the history that `_text` has
        self._lookup = PromptLookup(0, len(self._text), expected=len(before))

    def read(self, history: list[int], most: int) -> int:
        """As `PromptLookup.read`."""
        if len(history) > self._behind:
            self._text += history[self._behind :]
            self._behind = len(history)
        return self._lookup.read(self._text, most)

    def guesses(
        self, history: list[int], unknown: int, most: int, least: float
    ) -> tuple[list[int], list[float]]:
        """As `PromptLookup.guesses`, of a history that is read."""
        if len(history) > self._behind:
            return [], []
        return self._lookup.guesses(self._text, unknown, most, least)
