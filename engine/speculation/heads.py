"""Draft heads: guesses from the served model's own last state, by one small recurrent network.

After EAGLE (arXiv 2401.15077), which predicts the model's next state from its last one and the sampled
token, and Hydra (arXiv 2402.05109), whose heads see the guesses before them; Medusa's (arXiv 2401.10774)
do not. This one is a gated MLP without attention, applied again for each guess, so it has no keys and
values of its own. Logits are those of the model's head, or of its rows of the most frequent ids, as in
EAGLE-3 (arXiv 2503.01840).
"""

import time

import torch

from engine.backends.layers.norm import RmsNorm
from engine.batch import Row, Sampled
from engine.decoding.sampling import finite_best_ids
from engine.models.linears import float_gated_linear, float_linear
from engine.models.load import LoadedModel
from engine.speculation.heads_file import HeadsFile

_NEW = 0.2  # the weight of a new measurement


class DraftHeads:
    """Implements `engine.batch.Drafter`."""

    def __init__(self, file: HeadsFile, model: LoadedModel) -> None:
        """Raises CheckpointError naming a tensor that is not finite."""
        dtype, decoder = model.dtype, model.decoder
        width = model.spec.hidden
        self._norm = RmsNorm(torch.ones(width, dtype=dtype), torch.finfo(dtype).eps)
        self._merge = float_linear(file.read("merge.weight", dtype), few_rows=True)
        self._gate_up = float_gated_linear(file.read("gate_up.weight", dtype), few_rows=True)
        self._down = float_linear(file.read("down.weight", dtype), few_rows=True)
        self._embedding, self._head = decoder.embedding, decoder.head
        self._ids: torch.Tensor | None = None
        if "ids" in file.shapes:
            self._ids = file.read("ids", torch.int64)
            self._head = float_linear(file.read("head.weight", dtype), few_rows=True)
        # By the sequence's number: states, which of them gave its last token, and that token's position.
        self._known: dict[int, tuple[torch.Tensor, int, int]] = {}
        self.step_s = 0.0
        self._warm_up(width, dtype)

    @torch.inference_mode()
    def _warm_up(self, width: int, dtype: torch.dtype) -> None:
        """The first products take many times as long as all others."""
        for _ in range(2):
            self._head(
                self._next(torch.ones(1, width, dtype=dtype), torch.zeros(1, dtype=torch.long))
            )

    def observe(self, rows: list[Row], states: torch.Tensor, sampled: list[Sampled]) -> None:
        """The states, [tokens, hidden], that gave a step's logits, and what was taken of each row."""
        first = 0
        for row, each in zip(rows, sampled, strict=True):
            taken = len(each.tokens)
            if taken:
                position = row.position - row.drafts + taken - 1
                self._known[row.seq] = states, first + taken - 1, position
            first += 1 + row.drafts

    def forget(self, number: int) -> None:
        self._known.pop(number, None)

    @torch.inference_mode()
    def guesses(self, histories: dict[int, list[int]], count: int) -> dict[int, list[int]]:
        """`count` guesses after each history whose last token this engine has sampled last."""
        began = time.perf_counter()
        last = {n: known for n in histories if (known := self._known.get(n)) is not None}
        ready = [n for n, known in last.items() if known[2] == len(histories[n]) - 1]
        if not ready:
            return {}
        state = torch.stack([last[n][0][last[n][1]] for n in ready])
        tokens = torch.tensor([histories[n][-1] for n in ready])
        found = []
        for _ in range(count):
            state = self._next(state, tokens)
            # A state that is not finite has no likeliest id, and any guess after it is as good.
            tokens = finite_best_ids(self._head(state).float()).clamp_(min=0)
            if self._ids is not None:
                tokens = self._ids[tokens]
            found.append(tokens)
        ids = torch.stack(found, 1).tolist()
        self._measure((time.perf_counter() - began) / count)
        return dict(zip(ready, ids, strict=True))

    def _next(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The state that is expected after these tokens."""
        both = self._norm(state), self._norm(self._embedding(tokens))
        x = self._merge(torch.cat(both, -1))
        return self._down.plus(self._gate_up.gated(self._norm(x), "silu"), x)

    def _measure(self, seconds: float) -> None:
        seconds = min(seconds, 4 * self.step_s or seconds)
        self.step_s += _NEW * (seconds - self.step_s) if self.step_s else seconds
