"""Which devices, how many, in which layout and roles, for the least money within the objectives."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import ConfigError
from engine.planning.capacity import Replica, State, replica
from engine.planning.devices import Device
from engine.planning.memory import Adapters
from engine.planning.model_shape import ModelShape
from engine.planning.precision import Precision
from engine.planning.step_times import Layout, Serving
from engine.planning.workload import Workload

_SPARE = 0.8  # of a prefill replica's time, so that prompts seldom queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to plan. 0 for a degree of parallelism, or for `count`: any that fits."""

    shape: ModelShape
    workload: Workload
    devices: Sequence[Device]
    precision: Precision
    kv_bytes: float
    tensor: int = 0
    pipeline: int = 0
    data: int = 0
    expert: int = 0
    count: int = 0  # devices that there are
    adapters: Adapters = field(default_factory=Adapters)
    server: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One way to serve the workload: `replicas` that decode, and `prefillers` before them if roles are
    split. `rate` is what the whole serves within the objectives."""

    replica: Replica
    replicas: int
    prefillers: int
    state: State  # of a replica under its share of the workload
    knee: State  # of a replica at the highest rate that holds
    rate: float

    @property
    def devices(self) -> int:
        return (self.replicas + self.prefillers) * self.replica.serving.layout.devices

    @property
    def holds(self) -> bool:
        return self.rate >= self.replica.workload.rate * (1 - 1e-9)

    @property
    def usd_per_hour(self) -> float | None:
        price = self.replica.serving.device.price
        return None if price is None else price * self.devices

    @property
    def roles(self) -> str:
        return f"{self.prefillers} prefill + {self.replicas} decode" if self.prefillers else "both"

    def usd_per_million(self, tokens: float) -> float | None:
        """Of tokens of a kind, `tokens` of them a request, at the rate that is served."""
        cost = self.usd_per_hour
        served = min(self.rate, self.replica.workload.rate) * 3600 * tokens / 1e6
        return None if cost is None or not served else cost / served


def answers(question: Question) -> list[Answer]:
    """Every layout, the best first: those that hold before those that do not, then by cost, then by
    devices. Raises ConfigError where no layout is possible."""
    found = [answer for serving in _servings(question) for answer in _ways(question, serving)]
    if not found:
        raise ConfigError(
            "no layout is possible: give --tp, --pp and --ep that divide the model's heads and experts, "
            "or a larger --count"
        )
    return sorted(found, key=_order)


def _order(answer: Answer) -> tuple[object, ...]:
    cost = answer.usd_per_hour
    if not answer.holds:  # what comes nearest
        return (1, not answer.replica.memory.fits, -answer.rate, answer.devices)
    return (0, cost is None, cost if cost is not None else answer.devices, answer.devices)


def _servings(question: Question) -> Iterator[Serving]:
    shape = question.shape
    for device in question.devices:
        for layout in _layouts(question, device):
            yield Serving(
                shape, question.precision, question.kv_bytes, device, layout, question.server
            )


def _layouts(question: Question, device: Device) -> Iterator[Layout]:
    shape, most = question.shape, question.count or math.inf
    powers = [1, 2, 4, 8, 16, 32, 64]
    tensors = (
        [question.tensor] if question.tensor else [p for p in powers if p <= device.most_linked]
    )
    pipelines = [question.pipeline] if question.pipeline else [1, 2, 4]
    for tensor in tensors:
        for pipeline in pipelines:
            expert = question.expert or 1
            layout = Layout(tensor, pipeline, question.data or 1, expert)
            if question.tensor:
                layout.check(shape)
            if shape.query_heads % tensor or layout.devices > most:
                continue
            if pipeline > 1 and not question.pipeline and tensor < max(tensors):
                continue  # stages are for what does not fit one machine
            layout.check(shape)
            yield layout


def _ways(question: Question, serving: Serving) -> Iterator[Answer]:
    work = question.workload
    one = replica(serving, work, question.adapters)
    knee = one.capacity()
    most = question.count // serving.layout.devices if question.count else 0
    needed = math.ceil(work.rate / knee.rate - 1e-9) if knee.rate else 0
    replicas = max(1, min(needed, most) if most else needed)
    share = work.rate / replicas
    yield Answer(one, replicas, 0, one.state(share), knee, knee.rate * replicas)
    if knee.rate and (split := _split(question, serving, most)) is not None:
        yield split


def _split(question: Question, serving: Serving, most: int) -> Answer | None:
    """Prompts on replicas of their own, which send what they cached over the link."""
    work = question.workload
    seconds = serving.prompt_s(work.computed, work.shared)
    if not seconds:
        return None
    alone = replica(
        serving, replace(work, prompt=work.prompt, shared=work.prompt - 1), question.adapters
    )
    memory = replica(serving, work, question.adapters).memory
    decoder = Replica(serving, alone.workload, memory)
    sent = memory.kv_per_request / (serving.device.link * serving.layout.devices)
    wait = seconds * (1 + _SPARE / (2 * (1 - _SPARE))) + sent
    knee = decoder.capacity()
    if not knee.rate or (work.ttft and wait + knee.step > work.ttft):
        return None
    prefillers = math.ceil(work.rate * seconds / _SPARE)
    replicas = max(1, math.ceil(work.rate / knee.rate - 1e-9))
    if most and prefillers + replicas > most:
        return None
    state = decoder.state(work.rate / replicas)
    state = replace(state, ttft=wait + state.step)
    return Answer(
        Replica(serving, work, memory), replicas, prefillers, state, replace(knee, ttft=wait + knee.step),
        min(knee.rate * replicas, _SPARE * prefillers / seconds),
    )  # fmt: skip
