"""The port to the gateway: data and actions that pages need, provided by the composition root."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from starlette.responses import Response

from billing.stores import Store
from core.settings_in_force import SettingInForce
from core.tenants.plans import LimitRule
from core.tenants.scope import TenantScope


@dataclass(frozen=True, slots=True)
class EngineView:
    """One replica, as of its last heartbeat."""

    engine_id: str
    model: str  # by the names that requests use, separated by commas
    state: str  # healthy | loading | draining | silent (no heartbeat, or its breaker is open)
    running: int = 0
    waiting: int = 0
    tokens_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0  # 0: this kind of engine does not report it
    adapters: Mapping[str, int] = field(default_factory=dict)  # count by state
    held: Sequence[tuple[str, str]] = ()  # (digest, state) of its adapters
    block_size: int = 0  # tokens of a block of its cache; 0: not known

    @property
    def kv_share(self) -> float | None:
        return self.blocks_used / self.blocks_total if self.blocks_total else None


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """A component of the deployment: its state, and what to do if it does not work."""

    name: str
    state: str  # good | warn | bad | unused
    summary: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class LimitUsage:
    """Current use of a rate limit's bucket, which refills continuously."""

    rule: str  # name of the limit: tenant:requests:60
    used: int
    limit: int
    full_again_s: float


@dataclass(frozen=True, slots=True)
class Upload:
    """An uploaded adapter: an archive, or the two files of PEFT."""

    archive: IO[bytes] | None = None
    config: IO[bytes] | None = None
    weights: IO[bytes] | None = None


@dataclass(frozen=True, slots=True)
class UpstreamChange:
    upstream: str
    model: str
    change: str  # added | removed | changed
    fields: str  # names of those that changed


@dataclass(frozen=True, slots=True)
class UpstreamPreview:
    """What serving by the file of upstreams would change."""

    file: str
    digest: str
    models: Sequence[str]
    changes: Sequence[UpstreamChange]


class DashboardBackend(Protocol):
    def engines(self) -> Sequence[EngineView]: ...

    def regions(self) -> Mapping[str, str]:
        """By engine, as the list of upstreams names them."""
        ...

    def base_models(self) -> Sequence[str]: ...

    def check_key(
        self, scope: TenantScope, scopes: Mapping[str, Any], routing: Mapping[str, Any]
    ) -> None:
        """BadRequest for a model, an adapter or a route of a key that does not exist."""
        ...

    def check_issuer(self, url: str) -> None:
        """BadRequest for an issuer of single sign-on that could never be reached."""
        ...

    def residency(self) -> Mapping[str, Mapping[str, int]]:
        """Adapter digest -> state -> number of engines."""
        ...

    def configuration(self) -> Sequence[SettingInForce]:
        """Every setting of this process, without secrets."""
        ...

    def parts(self) -> Sequence[ComponentStatus]: ...

    def gauges(self) -> Mapping[str, Sequence[float]]:
        """Values of this gateway's own gauges by metric, one for each set of labels."""
        ...

    def used(self, scope: TenantScope, rules: Sequence[LimitRule]) -> Sequence[LimitUsage]:
        """Use of the tenant-wide rate limits; [] while the counters do not answer."""
        ...

    def add_adapter(self, scope: TenantScope, name: str, base: str, upload: Upload) -> None:
        """Validate and register. BadRequest if the files are invalid; nothing is stored then."""
        ...

    def preload(self, digest: str) -> None:
        """Have each engine of the adapter's model load it, before a request needs it."""
        ...

    def preview_upstreams(self) -> UpstreamPreview:
        """Conflict with the reason if the file cannot be served by."""
        ...

    def reload_upstreams(self, actor: str, digest: str) -> None:
        """Serve by the file, if it still is the list with this digest."""
        ...

    def collects_by(self) -> str:
        """The payment provider that collects, or "" if payments are recorded manually."""
        ...

    def card_page(self, scope: TenantScope) -> str:
        """URL of the provider's page for adding a payment method. Conflict, or Unavailable if it is
        down."""
        ...

    def portal_page(self, scope: TenantScope) -> str:
        """URL of the provider's billing portal; errors as above."""
        ...

    def bank_instructions(self, scope: TenantScope) -> Sequence[tuple[str, str]]:
        """Rows of the account for bank transfers; errors as above."""
        ...

    def export_store(self, destination: str) -> Store:
        """The store of a scheduled export. BadRequest for an invalid destination."""
        ...

    def export_tenant(self, scope: TenantScope) -> Response:
        """A ZIP archive of all that is stored of the tenant, as a download."""
        ...

    def erase_tenant(self, scope: TenantScope, confirm: str) -> None:
        """Erase all but the books of a closed tenant. Conflict if it is not closed, or something of it
        waits; BadRequest unless `confirm` is its name."""
        ...

    def plan(self, written: Mapping[str, str]) -> Mapping[str, Any]:
        """A plan of capacity as `/admin/v1/plan` describes it, with goodput over load as `curve`.
        BadRequest names the field."""
        ...

    def changed(self) -> None:
        """Reload policies, adapters and drained engines in this process after a change."""
        ...

    def finalise_invoices(self, tenant_id: str) -> Sequence[str]:
        """Finalise the tenant's ended periods without their grace; the ids of the new invoices.
        Conflict if there is none."""
        ...

    def audit(self) -> bool:
        """Start an audit. Returns whether it has ended; else it continues. Its report is stored."""
        ...

    def replay(self, ids: Sequence[int]) -> int:
        """Replay the dead letters with these ids, or all if `ids` is empty; returns how many."""
        ...
