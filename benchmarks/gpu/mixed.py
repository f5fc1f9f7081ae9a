"""Steps in which a short prompt stands beside decoding sequences: as a graph, and with their kernels
launched one by one."""

from unittest import mock

from benchmarks.gpu.decode import BLOCK, GREEDY, Decoding
from benchmarks.gpu.figures import figure
from engine.batch import Row, StepBatch
from engine.execution.gpu_runner import GpuRunner

_PROMPT = 100  # tokens


class Mixed(Decoding):
    """Decoding sequences, beside which each step computes the same prompt again."""

    def _batch(self) -> StepBatch:
        rows = super()._batch().rows
        first = 1 + max(max(blocks) for blocks in self._blocks)
        blocks = list(range(first, first + -(-_PROMPT // BLOCK)))
        number = len(self._blocks)
        prompt = Row(number, [6] * _PROMPT, 0, blocks, None, True, GREEDY, 0, [], 0)
        return StepBatch([*rows, prompt])

    def finish(self) -> None:
        super().finish()
        self._runner.forget(len(self._blocks))


def beside_a_prompt(name: str, runner: GpuRunner, sequences: int = 16) -> None:
    steps = Mixed(runner, sequences, 256, 60)
    graph = steps.step_ms()
    steps.finish()
    with mock.patch.object(runner._graphs, "key_of", return_value=None):
        steps = Mixed(runner, sequences, 256, 60)
        launched = steps.step_ms()
        steps.finish()
    figure(
        f"gpu_mixed_{name}", graph, "ms", higher_is_better=False,
        peer="the same steps without a graph", peer_value=launched, at_least=1.0, aim=1.1,
        settings={"sequences": sequences, "context": 256, "prompt": _PROMPT},
    )  # fmt: skip
