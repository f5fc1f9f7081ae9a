"""The state of one adapter in the engine, and the transitions between its statuses.

absent -> host -> loading -> resident -> draining -> host -> absent.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.batch import AdapterHandle
from engine.errors import IntegrityError
from engine.protocol import AdapterState


class Lack(StrEnum):
    """What a waiting sequence lacks to run."""

    SEATS = "seats"  # max_running is reached
    SLOT = "slot"  # for its adapter
    BLOCKS = "blocks"
    WEIGHTS = "weights"  # still being read from disk


class Place(StrEnum):
    ABSENT = "absent"
    HOST = "host"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


_MOVES = {
    Place.ABSENT: (Place.HOST,),
    Place.HOST: (Place.ABSENT, Place.LOADING),
    Place.LOADING: (Place.RESIDENT, Place.HOST),
    Place.RESIDENT: (Place.DRAINING,),
    Place.DRAINING: (Place.HOST,),
}


@dataclass(eq=False, slots=True)
class Adapter:
    digest: str
    path: str
    rank: int
    bytes: int  # size of its weight file; counts against the host tier's budget
    need: int  # blocks that it takes on the device
    place: Place = Place.ABSENT
    handle: AdapterHandle | None = None
    blocks: list[int] | None = None
    users: int = 0  # running sequences on the handle
    accepted: int = 0  # accepted requests that have not ended and may still need it
    retired: bool = False  # a gateway unloaded it: it takes no new requests
    failure: str = ""
    generation: int = 0
    last_used: int = 0

    def move(self, place: Place) -> None:
        if place not in _MOVES[self.place]:
            raise IntegrityError(f"adapter {self.digest[:12]} cannot go {self.place} -> {place}")
        self.place = place

    def state(self) -> AdapterState:
        return AdapterState(self.digest, self.place.value, self.rank, self.generation, self.failure)
