"""FastAPI dependencies: the services, and the principal that calls."""

from typing import Annotated

from fastapi import Depends, Request

from core.tenants.keys import Principal
from gateway.http.exchange import Exchange
from gateway.wiring import Services


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def principal_of(request: Request) -> Principal:
    exchange = Exchange(dict(request.scope), request.receive, None)
    return await services_of(request).pipeline.auth.principal(exchange, request.url.path)


ServicesDep = Annotated[Services, Depends(services_of)]
Caller = Annotated[Principal, Depends(principal_of)]
