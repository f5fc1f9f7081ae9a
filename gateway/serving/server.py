"""What serves a request on a surface: the pipeline, or the one that stores responses before it."""

from typing import Protocol

from gateway.answers.surface import Surface
from gateway.edge.auth.authenticator import Authenticator
from gateway.request.exchange import Exchange
from gateway.serving.responses import RequestLimits


class Server(Protocol):
    @property
    def auth(self) -> Authenticator: ...

    @property
    def limits(self) -> RequestLimits: ...

    async def serve(self, surface: Surface, exchange: Exchange) -> None: ...
