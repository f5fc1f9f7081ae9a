"""FastAPI dependencies: the services that a route names as its parameters, and the calling key.

A route receives what it uses, and nothing else of the process.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from billing.notices.alert_targets import AlertTargets
from billing.payments.base import PaymentProvider
from core.clock import Clock
from core.database import Database
from core.ids import REQUEST, new_id
from core.settings import Settings
from core.storage import StorageQuotas
from core.tenants.keys import Principal
from core.tenants.roles import Roles
from gateway.admission.limiter import Admission
from gateway.admission.rejections import RejectionCounter
from gateway.admission.request import AdmissionRequest
from gateway.admission.request_rate import RequestRate
from gateway.catalog.adapter_registry import AdapterRegistry
from gateway.catalog.catalog import Catalog
from gateway.edge.auth.authenticator import Authenticator
from gateway.edge.auth.dashboard_auth import DashboardAuth
from gateway.edge.auth.sign_on_directory import SignOnDirectory
from gateway.edge.tenant_slots import take_slot
from gateway.engines.reloading import UpstreamReload
from gateway.engines.routing.engine_view import EngineView
from gateway.metering.spool import Spool
from gateway.request.exchange import Exchange
from gateway.screening.policy_view import PolicyView
from gateway.screening.second_opinions import SecondOpinions
from gateway.serving.background.responses import BackgroundResponses
from gateway.serving.payments import CardPages
from gateway.serving.responses import RequestLimits
from gateway.serving.services import Services
from moderation.screener import Screener

Readiness = Callable[[], Awaitable[dict[str, dict[str, Any]]]]


def _from(pick: Callable[[Services], object]) -> Any:
    async def _pick(request: Request) -> object:
        return pick(request.app.state.services)

    return Depends(_pick)


SettingsDep = Annotated[Settings, _from(lambda services: services.settings)]
ClockDep = Annotated[Clock, _from(lambda services: services.clock)]
AlertTargetsDep = Annotated[AlertTargets, _from(lambda services: services.alert_targets)]
DatabaseDep = Annotated[Database, _from(lambda services: services.database)]
RolesDep = Annotated[Roles, _from(lambda services: services.roles)]
OperatorToken = Annotated[str, _from(lambda services: services.operator_token)]
AuthDep = Annotated[Authenticator, _from(lambda services: services.pipeline.auth)]
DashboardAuthDep = Annotated[DashboardAuth, _from(lambda services: services.dashboard_auth)]
SignOnDep = Annotated[SignOnDirectory, _from(lambda services: services.sign_on)]
CatalogDep = Annotated[Catalog, _from(lambda services: services.catalog)]
AdaptersDep = Annotated[AdapterRegistry, _from(lambda services: services.adapters)]
LimitsDep = Annotated[RequestLimits, _from(lambda services: services.pipeline.limits)]
AdmissionDep = Annotated[Admission, _from(lambda services: services.pipeline.admission)]
RequestRateDep = Annotated[RequestRate, _from(lambda services: services.limiter.request_rate)]
RejectionsDep = Annotated[RejectionCounter, _from(lambda services: services.rejections)]
SpoolDep = Annotated[Spool, _from(lambda services: services.spool)]
ScreenerDep = Annotated[Screener | None, _from(lambda services: services.screener)]
PoliciesDep = Annotated[PolicyView, _from(lambda services: services.policies)]
OpinionsDep = Annotated[SecondOpinions, _from(lambda services: services.opinions)]
EnginesDep = Annotated[EngineView, _from(lambda services: services.engines)]
UpstreamReloadDep = Annotated[UpstreamReload, _from(lambda services: services.upstream_reload)]
BackgroundDep = Annotated[BackgroundResponses, _from(lambda services: services.background)]
CardPagesDep = Annotated[CardPages, _from(lambda services: services.card_pages)]
PaymentsDep = Annotated[PaymentProvider, _from(lambda services: services.payments)]
QuotasDep = Annotated[StorageQuotas, _from(lambda services: services.storage)]
ReadinessDep = Annotated[Readiness, _from(lambda services: services.readiness)]


async def principal_of(request: Request, auth: AuthDep) -> Principal:
    exchange = Exchange(dict(request.scope), request.receive, None)
    principal = await auth.principal(exchange, request.url.path)
    await take_slot(request, principal.tenant_id)
    return principal


Caller = Annotated[Principal, Depends(principal_of)]


async def counted_caller(request: Request, caller: Caller, rate: RequestRateDep) -> Principal:
    """A call that changes something counts against the limits on requests."""
    if request.method not in ("GET", "HEAD"):
        await rate.count(AdmissionRequest.without_prompt(new_id(REQUEST), caller, ""))
    return caller


CountedCaller = Annotated[Principal, Depends(counted_caller)]
