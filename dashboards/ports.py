"""What only the gateway knows and the pages show: handed in by the composition root."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from billing.exports.stores import Store
from core.tenants.plans import LimitRule
from core.tenants.scope import TenantScope


@dataclass(frozen=True, slots=True)
class EngineView:
    """One replica as its last heartbeat said."""

    engine_id: str
    model: str
    state: str  # healthy | loading | draining | silent (away, or left alone after failures)
    running: int = 0
    waiting: int = 0
    tokens_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0  # 0: this kind of engine does not say
    adapters: Mapping[str, int] = field(default_factory=dict)  # by state

    @property
    def kv_share(self) -> float | None:
        return self.blocks_used / self.blocks_total if self.blocks_total else None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the house: whether it does its work, and what to do if not."""

    name: str
    state: str  # good | warn | bad | unused
    says: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """How much of a bucket is taken now; it refills continuously."""

    rule: str  # as limits are named: tenant:requests:60
    used: int
    limit: int
    full_again_s: float


@dataclass(frozen=True, slots=True)
class Upload:
    """An adapter as a form sent it: an archive, or the two files of PEFT."""

    archive: IO[bytes] | None = None
    config: IO[bytes] | None = None
    weights: IO[bytes] | None = None


class Gatehouse(Protocol):
    def engines(self) -> Sequence[EngineView]: ...

    def base_models(self) -> Sequence[str]: ...

    def residency(self) -> Mapping[str, Mapping[str, int]]:
        """Adapter digest -> state -> on how many engines."""
        ...

    def parts(self) -> Sequence[Part]: ...

    def used(self, scope: TenantScope, rules: Sequence[LimitRule]) -> Sequence[Used]:
        """Of the rates of the tenant as a whole; [] while the counters do not answer."""
        ...

    def add_adapter(self, scope: TenantScope, name: str, base: str, upload: Upload) -> None:
        """BadRequest says what is wrong with the files; nothing of them is kept then."""
        ...

    def collects_by(self) -> str:
        """The payment provider that collects, or "" where people book payments by hand."""
        ...

    def card_page(self, scope: TenantScope) -> str:
        """The provider's page to leave a card on. Conflict, or Unavailable while it is silent."""
        ...

    def export_store(self, destination: str) -> Store:
        """Where a scheduled export goes; BadRequest where that is no destination."""
        ...

    def changed(self) -> None:
        """Policies or adapters were changed: this process reads them again at once."""
        ...

    def replay(self, ids: Sequence[int]) -> int:
        """Play dead letters again, all without ids; returns how many."""
        ...
