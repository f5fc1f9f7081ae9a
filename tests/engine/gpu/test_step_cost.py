"""The GPU runner's host work in a decoding step does not grow with the context."""

from typing import Any

import pytest

from engine.batch import LAST_SAMPLED, Row
from engine.protocol import SamplingParams
from tests.engine.scheduling.test_step_cost import LONG, SHORT, Count, counted

step = pytest.importorskip("engine.backends.gpu.step")
sequence_rows = pytest.importorskip("engine.backends.gpu.sequence_rows")
GREEDY = SamplingParams(max_tokens=9)


def test_a_decoding_step() -> None:
    def steps(context: int) -> int:
        count = Count()
        rows = sequence_rows.SequenceRows(4)
        blocks = counted(count, list(range(context // 16)))
        history = counted(count, [7] * context)

        def one(at: int, rows: Any = rows, blocks: Any = blocks, history: Any = history) -> None:
            if at % 16 == 0:
                blocks.append(at // 16)
            row = Row(1, [LAST_SAMPLED], at, blocks, None, True, GREEDY, 0, history, 20)
            assigned, changes = rows.assign([row])
            assert len(changes) == (at % 16 == 0)
            step.host_step([row], [], assigned, 16)

        first = Row(1, [7], context - 1, blocks, None, True, GREEDY, 0, history, 20)
        assert len(rows.assign([first])[1]) == context // 16
        return count.of(lambda: [one(context + n) for n in range(20)])

    assert steps(LONG) == steps(SHORT)
