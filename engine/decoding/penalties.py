"""The repetition, frequency and presence penalties, from counts that stay on the device."""

import numpy as np
import torch

from engine.backends.layers.transfer import on_device, send
from engine.batch import Row
from engine.decoding.edits import penalised


class Penalties:
    """Applies penalties. Counts stay on the device, where one launch adds the sampled ids of all
    rows. A sequence's are rebuilt from its history when their number differs from the row's."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._slots: dict[int, int] = {}  # sequence -> its row in the counts
        self._outputs: dict[int, int] = {}  # sequence -> generated ids that its row counts
        self._free = [0]
        # [slots, vocab]: the ids that the prompt contains, and how often each was generated.
        self._prompt = torch.zeros(1, vocab, dtype=torch.bool, device=device)
        self._output = torch.zeros(1, vocab, device=device)
        self._one = torch.ones((), device=device)

    def apply_(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Changes float32 logits [rows, vocab] in place; rows without penalties stay the same."""
        counted = [n for n, row in enumerate(rows) if penalised(row.sampling)]
        if counted:
            self._penalise_(rows, logits, counted)

    def count(self, rows: list[Row], tokens: torch.Tensor) -> None:
        """Adds the tokens just sampled, [rows]; those below 0 end their sequences."""
        counted = [n for n, row in enumerate(rows) if row.seq in self._slots]
        if not counted:
            return
        for n in counted:
            self._outputs[rows[n].seq] += 1
        slots = on_device([self._slots[rows[n].seq] for n in counted], self._device)
        if len(counted) < len(rows):
            tokens = tokens[on_device(counted, self._device)]
        self._output.index_put_((slots, tokens.clamp(min=0)), self._one, accumulate=True)

    def forget(self, seq: int) -> None:
        slot = self._slots.pop(seq, None)
        if slot is not None:
            del self._outputs[seq]
            self._free.append(slot)

    def _penalise_(self, rows: list[Row], logits: torch.Tensor, which: list[int]) -> None:
        params = [rows[n].sampling for n in which]
        slots = on_device([self._slot_of(rows[n]) for n in which], self._device)
        output = self._output[slots]
        seen = self._prompt[slots] | (output > 0)
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

    def _slot_of(self, row: Row) -> int:
        outputs = row.position - row.prompt_len
        slot = self._slots.get(row.seq)
        if slot is None:
            slot = self._slots[row.seq] = self._free_slot()
        elif self._outputs[row.seq] == outputs:
            return slot
        self._outputs[row.seq] = outputs
        history = np.array(row.history[: row.prompt_len + outputs], np.int64)
        prompt = np.zeros(self._vocab, np.bool_)
        prompt[history[: row.prompt_len]] = True
        output = np.bincount(history[row.prompt_len :], minlength=self._vocab)
        self._prompt[slot] = send(torch.from_numpy(prompt), self._device)
        self._output[slot] = send(torch.from_numpy(output.astype(np.float32)), self._device)
        return slot

    def _free_slot(self) -> int:
        if not self._free:
            size = len(self._output)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self._prompt = torch.cat((self._prompt, torch.zeros_like(self._prompt)))
            self._output = torch.cat((self._output, torch.zeros_like(self._output)))
        return self._free.pop()

    def _column(self, values: list[float]) -> torch.Tensor:
        return on_device(values, self._device)[:, None]
