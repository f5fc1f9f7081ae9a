"""The state of one adapter in the engine, and the transitions between its statuses.

absent -> host -> loading -> resident -> draining -> host -> absent.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.batch import AdapterHandle
from engine.errors import IntegrityError
from engine.protocol import AdapterState


class Shortage(StrEnum):
    """What a waiting sequence lacks to run."""

    RUNNING_SLOTS = "running slots"  # max_running is reached
    ADAPTER_SLOT = "slot"  # for its adapter
    BLOCKS = "blocks"
    WEIGHTS = "weights"  # still being read from disk
    KEYS = "keys"  # of its prompt's blocks, computed over several steps


class AdapterStatus(StrEnum):
    ABSENT = "absent"
    HOST = "host"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


_TRANSITIONS = {
    AdapterStatus.ABSENT: (AdapterStatus.HOST,),
    AdapterStatus.HOST: (AdapterStatus.ABSENT, AdapterStatus.LOADING),
    AdapterStatus.LOADING: (AdapterStatus.RESIDENT, AdapterStatus.HOST),
    AdapterStatus.RESIDENT: (AdapterStatus.DRAINING,),
    AdapterStatus.DRAINING: (AdapterStatus.HOST,),
}


@dataclass(eq=False, slots=True)
class Adapter:
    digest: str
    path: str
    rank: int
    bytes: int  # of its copy in host memory; counts against the host tier's budget
    blocks_needed: int  # blocks that it takes on the device
    status: AdapterStatus = AdapterStatus.ABSENT
    handle: AdapterHandle | None = None
    blocks: list[int] | None = None
    sequences: int = 0  # running sequences on the handle
    open_requests: int = 0  # accepted requests that have not ended and may still need it
    retired: bool = False  # a gateway unloaded it: it takes no new requests
    failure: str = ""
    generation: int = 0
    last_used: int = 0

    def transition_to(self, status: AdapterStatus) -> None:
        if status not in _TRANSITIONS[self.status]:
            raise IntegrityError(f"adapter {self.digest[:12]} cannot go {self.status} -> {status}")
        self.status = status

    def state(self) -> AdapterState:
        return AdapterState(
            self.digest, self.status.value, self.rank, self.generation, self.failure
        )
