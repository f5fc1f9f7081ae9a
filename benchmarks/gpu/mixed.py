"""Steps in which a short prompt stands beside decoding sequences: as a graph, and with their kernels
launched one by one."""

from unittest import mock

from benchmarks.gpu.decode import BLOCK, GREEDY, Decoding
from benchmarks.gpu.figures import figure
from benchmarks.gpu.sizes import Steps
from engine.batch import Row, StepBatch
from engine.runners.gpu.runner import GpuRunner


class Mixed(Decoding):
    """Decoding sequences, beside which each step computes the same prompt again."""

    prompt = 100  # tokens

    def _batch(self) -> StepBatch:
        rows = super()._batch().rows
        first = 1 + max(max(blocks) for blocks in self._blocks)
        blocks = list(range(first, first + -(-self.prompt // BLOCK)))
        number = len(self._blocks)
        prompt = Row(number, [6] * self.prompt, 0, blocks, None, True, GREEDY, 0, [], 0)
        return StepBatch([*rows, prompt])

    def finish(self) -> None:
        super().finish()
        self._runner.forget(len(self._blocks))


def beside_a_prompt(name: str, runner: GpuRunner, sizes: Steps) -> None:
    sequences = min(16, *sizes.sequences)
    graph = _step_ms(runner, sequences, sizes)
    with mock.patch.object(runner._graphs, "key_of", return_value=None):
        launched = _step_ms(runner, sequences, sizes)
    figure(
        f"gpu_mixed_{name}", graph, "ms", higher_is_better=False,
        peer="the same steps without a graph", peer_value=launched, at_least=1.0, aim=1.1,
        settings={"sequences": sequences, "context": sizes.context, "prompt": sizes.prompt},
    )  # fmt: skip


def _step_ms(runner: GpuRunner, sequences: int, sizes: Steps) -> float:
    steps = Mixed(runner, sequences, sizes.context, -(-3 * sizes.count // 10))
    steps.prompt = sizes.prompt
    ms = steps.step_ms()
    steps.finish()
    return ms
