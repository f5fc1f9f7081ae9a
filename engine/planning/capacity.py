"""How many requests a second a replica serves within the objectives, and what limits it.

    sequences at once   n = rate · output · tpot                                   (Little's law)
    output token        tpot = (step(n) + share of prompts) / tokens a step
    share of prompts    ρ = rate · chunk(prompt): the replica's time that prompts take
    first token         ttft = own · (1 + ρ / (2·(1 − ρ))) + step                  (M/D/1 queue)

The closed form chooses; `simulation` then plays the choice on the engine's own scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.planning.memory import Adapters, Memory, memory_of
from engine.planning.step_times import Serving, factors_of, total
from engine.planning.workload import Workload

_BUSIEST = 0.95  # of the time: beyond it a queue has no end in practice
_CLOSE = 1e-4  # of the result
_ROUNDS = 60
_GROUPS = {
    "weights": "bandwidth", "experts": "bandwidth", "cache": "bandwidth",
    "products": "compute", "products_bf16": "compute", "products_fp8": "compute",
    "products_fp4": "compute", "products_int8": "compute", "scores": "compute",
    "link": "network", "sync": "network", "prompt_link": "network",
    "layers": "launches", "prompt_layers": "launches", "rows": "launches", "index": "launches",
    "spread": "launches",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class State:
    """A replica under a rate: seconds, and shares of its time."""

    rate: float
    sequences: float  # that decode at the same time
    step: float
    tpot: float
    ttft: float
    busy: float  # with prompts
    shares: Mapping[str, float]  # of an output token's time, by what takes it
    steady: bool  # the load can be sustained
    limit: str = ""  # the first thing that does not hold: memory, compute, ttft, tpot; "": all hold

    @property
    def binds(self) -> str:
        """The resource that takes the largest part of the time, or what breaks first."""
        return max(self.shares, key=lambda name: self.shares[name])


@dataclass(frozen=True, slots=True)
class Replica:
    serving: Serving
    workload: Workload
    memory: Memory

    def state(self, rate: float) -> State:
        """By iteration: more sequences take longer steps, and longer steps leave more sequences."""
        work, serving = self.workload, self.serving
        context = work.prompt + work.output / 2
        gain, width = work.tokens_a_step, 1 + work.guesses
        chunk = serving.prompt(work.computed, work.shared)
        busy = rate * sum(chunk.values())
        room = max(self.memory.sequences, 1.0)
        sequences, parts, step = 1.0, {}, 0.0
        for _ in range(_ROUNDS):
            parts = serving.decode(sequences, context)
            if work.guesses:
                parts["products"] *= width
            step = total(parts)
            tpot = step / gain / max(1e-9, 1 - busy)
            wanted = rate * work.output * tpot
            following = min(room, max(1.0, (sequences + wanted) / 2))
            if abs(following - sequences) < 1e-5 * sequences:
                break
            sequences = following
        tpot = step / gain / max(1e-9, 1 - busy)
        own = sum(serving.prompt_terms(work.computed, work.shared).values())
        own *= factors_of(serving.kind, serving.server)["first_own"]
        queue = busy / (2 * max(1e-9, 1 - busy))
        ttft = own * (1 + queue) + step
        over = rate * work.output * tpot > room * (1 + 1e-4)
        return State(
            rate=rate,
            sequences=sequences,
            step=step,
            tpot=tpot,
            ttft=ttft,
            busy=busy,
            shares=_shares(parts, chunk, busy, step),
            steady=busy <= _BUSIEST and not over,
            limit=self._limit(busy, over, ttft, tpot),
        )

    def _limit(self, busy: float, over: bool, ttft: float, tpot: float) -> str:
        work = self.workload
        if over:
            return "memory"
        if busy > _BUSIEST:
            return "compute"
        if work.ttft and ttft > work.ttft:
            return "ttft"
        return "tpot" if work.tpot and tpot > work.tpot else ""

    def capacity(self) -> State:
        """The state at the highest rate that holds; its rate is 0 if none does, and `limit` says why.

        This is the knee of goodput: beyond it requests miss their objectives.
        """
        least = self.state(1e-9)
        if not self.memory.fits:
            return State(
                0.0, 0.0, least.step, least.tpot, least.ttft, 0.0, least.shares, False, "memory"
            )
        if least.limit:
            return State(
                0.0, 0.0, least.step, least.tpot, least.ttft, 0.0, least.shares, False, least.limit
            )
        low, high = 0.0, 1.0
        while not self.state(high).limit and high < 1e9:
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if not self.state(middle).limit else (low, middle)
        return self.state(low)

    def curve(self, highest: float, points: int = 24) -> list[State]:
        """States at evenly spaced rates up to the highest."""
        return [self.state(highest * number / points) for number in range(1, points + 1)]

    def ridge(self) -> float:
        """Sequences at which a step's products take as long as what it reads: with fewer, bandwidth
        binds, with more, compute. Infinite where the cache grows as fast."""
        context = self.workload.prompt + self.workload.output / 2
        low, high = 1.0, 2.0
        while not self._computes(high, context):
            if high > 1e7:
                return float("inf")
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._computes(middle, context) else (middle, high)
        return high

    def _computes(self, rows: float, context: float) -> bool:
        parts = self.serving.decode(rows, context)
        return parts["products"] >= parts["weights"] + parts["experts"] + parts["cache"]


def replica(serving: Serving, workload: Workload, adapters: Adapters | None = None) -> Replica:
    serving.layout.check(serving.shape)
    length = workload.prompt + workload.output
    return Replica(serving, workload, memory_of(serving, length, workload.shared, adapters))


def _shares(
    parts: Mapping[str, float], chunk: Mapping[str, float], busy: float, step: float
) -> dict[str, float]:
    """Of the replica's time: prompts take `busy` of it, decode steps the rest."""
    read = parts["weights"] + parts["experts"] + parts["cache"]
    hidden = {"products"} if read >= parts["products"] else {"weights", "experts", "cache"}
    found = dict.fromkeys(("bandwidth", "compute", "network", "launches"), 0.0)
    for name, seconds in parts.items():
        if name not in hidden:
            found[_GROUPS[name]] += (1 - min(busy, 1)) * seconds / step
    whole = sum(chunk.values())
    for name, seconds in chunk.items():
        found[_GROUPS[name]] += min(busy, 1) * seconds / whole
    return found
