"""One adapter as the engine knows it, and the moves that its life allows.

absent -> host -> loading -> resident -> draining -> host -> absent.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.batch import AdapterHandle
from engine.errors import IntegrityError
from engine.protocol import AdapterState


class Lack(StrEnum):
    """Why a sequence cannot run now."""

    SEATS = "seats"  # of max_running
    SLOT = "slot"  # for its adapter
    BLOCKS = "blocks"
    WEIGHTS = "weights"  # still on their way from disk


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
    bytes: int  # of its file, for the host tier's budget
    need: int  # blocks on the device
    place: Place = Place.ABSENT
    handle: AdapterHandle | None = None
    blocks: list[int] | None = None
    users: int = 0  # running sequences on the handle
    accepted: int = 0  # requests taken and not over: they may still need it
    retired: bool = False  # unloaded by a gateway: no new requests
    failure: str = ""
    generation: int = 0
    last_used: int = 0

    def move(self, place: Place) -> None:
        if place not in _MOVES[self.place]:
            raise IntegrityError(f"adapter {self.digest[:12]} cannot go {self.place} -> {place}")
        self.place = place

    def state(self) -> AdapterState:
        return AdapterState(self.digest, self.place.value, self.rank, self.generation, self.failure)
