"""Weighted fair queueing by virtual time (start-time fair queueing, Goyal et al. 1996).

Each flow is served in proportion to its weight, whatever the others send. An idle flow resumes at
the current virtual time, so idling earns no credit.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[Item]):
    flow: str
    start: float
    finish: float
    item: Item


class FairQueue(Generic[Item]):
    def __init__(self) -> None:
        self._flows: dict[str, deque[Ticket[Item]]] = {}
        self._last: dict[str, float] = {}
        self._virtual = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, flow: str, weight: int, cost: int, item: Item) -> Ticket[Item]:
        """`cost` is in tokens; only its ratio to the weight matters."""
        start = max(self._virtual, self._last.get(flow, 0.0))
        ticket = Ticket(flow, start, start + max(1, cost) / max(1, weight), item)
        self._last[flow] = ticket.finish
        self._flows.setdefault(flow, deque()).append(ticket)
        self._length += 1
        return ticket

    def heads(self) -> list[Ticket[Item]]:
        """The first ticket of each flow, in service order."""
        return sorted((queue[0] for queue in self._flows.values()), key=lambda ticket: ticket.start)

    def position(self, ticket: Ticket[Item]) -> int:
        """The number of tickets that are served before this one."""
        return sum(other.start < ticket.start for queue in self._flows.values() for other in queue)

    def serve(self, ticket: Ticket[Item]) -> None:
        """Remove the ticket as served and advance the virtual time."""
        self._virtual = max(self._virtual, ticket.start)
        self.remove(ticket)

    def remove(self, ticket: Ticket[Item]) -> None:
        queue = self._flows.get(ticket.flow)
        if queue is None or ticket not in queue:
            return
        queue.remove(ticket)
        self._length -= 1
        if not queue:
            del self._flows[ticket.flow]
        if not self._flows:
            self._last.clear()
            self._virtual = 0.0
