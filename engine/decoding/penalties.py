"""Changes to logits before temperature: repetition, frequency, presence, bias, min_tokens."""

from dataclasses import dataclass

import torch

from engine.batch import Row
from engine.layers.transfer import on_device
from engine.protocol import SamplingParams


@dataclass(slots=True)
class _Counts:
    """Token counts of one sequence."""

    prompt: torch.Tensor  # bool [vocab]: ids that the prompt contains
    output: torch.Tensor  # float32 [vocab]: how often each id was generated
    outputs: int  # generated ids counted in `output`


class Penalties:
    """Applies penalties. Counts stay on the device and are updated with each sampled id; they are
    rebuilt from the history when their number of outputs differs from the row's."""

    def __init__(self, vocab: int, eos: tuple[int, ...], device: torch.device) -> None:
        self._vocab = vocab
        self._eos = eos
        self._device = device
        self._counts: dict[int, _Counts] = {}

    def apply_(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Changes float32 logits [rows, vocab] in place; rows without penalties stay the same."""
        counted = [n for n, row in enumerate(rows) if _penalised(row.sampling)]
        if counted:
            self._penalise_(rows, logits, counted)
        at: list[tuple[int, int]] = []
        amounts: list[float] = []
        for n, row in enumerate(rows):
            for token, amount in row.sampling.logit_bias.items():
                at.append((n, token))
                amounts.append(amount)
            if _position(row) - row.prompt_len < row.sampling.min_tokens:
                ends = {*self._eos, *row.sampling.stop_token_ids}
                at += [(n, token) for token in ends]
                amounts += [float("-inf")] * len(ends)
        if at:
            index = on_device(at, self._device).unbind(1)
            values = on_device(amounts, self._device)
            logits.index_put_(index, values, accumulate=True)

    def count(self, rows: list[Row], tokens: torch.Tensor) -> None:
        """Adds the tokens just sampled, [rows]."""
        for n, row in enumerate(rows):
            counts = self._counts.get(row.seq)
            if counts is not None:
                counts.output.index_add_(0, tokens[n : n + 1], counts.output.new_ones(1))
                counts.outputs += 1

    def forget(self, seq: int) -> None:
        self._counts.pop(seq, None)

    def _penalise_(self, rows: list[Row], logits: torch.Tensor, which: list[int]) -> None:
        counts = [self._of(rows[n]) for n in which]
        params = [rows[n].sampling for n in which]
        output = torch.stack([c.output for c in counts])
        seen = torch.stack([c.prompt for c in counts]) | (output > 0)
        index = on_device(which, self._device)
        penalised = logits[index]
        repetition = self._column([p.repetition_penalty for p in params])
        penalised = torch.where(
            seen,
            torch.where(penalised > 0, penalised / repetition, penalised * repetition),
            penalised,
        )
        penalised -= self._column([p.frequency_penalty for p in params]) * output
        penalised -= self._column([p.presence_penalty for p in params]) * (output > 0)
        logits[index] = penalised

    def _of(self, row: Row) -> _Counts:
        outputs = _position(row) - row.prompt_len
        counts = self._counts.get(row.seq)
        if counts is None or counts.outputs != outputs:
            history = torch.tensor(row.history[: row.prompt_len + outputs], dtype=torch.int64)
            prompt = torch.zeros(self._vocab, dtype=torch.bool)
            prompt[history[: row.prompt_len]] = True
            output = torch.bincount(history[row.prompt_len :], minlength=self._vocab).float()
            counts = _Counts(prompt.to(self._device), output.to(self._device), outputs)
            self._counts[row.seq] = counts
        return counts

    def _column(self, values: list[float]) -> torch.Tensor:
        return on_device(values, self._device)[:, None]


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _position(row: Row) -> int:
    """The position of the token about to be sampled."""
    return row.start + len(row.tokens)
