"""Mounts the dashboard on this gateway's services."""

from dashboards.app import Asgi, create_dashboard
from dashboards.viewer import House
from gateway.auth.doorman import Doorman
from gateway.gatehouse import Gatehouse
from gateway.wiring import Services


def dashboard_of(services: Services) -> Asgi:
    doorman = Doorman(
        services.roles,
        services.pipeline.auth.attempts,
        services.clock,
        services.operator_token,
    )
    return create_dashboard(
        House(
            services.database,
            services.clock,
            doorman,
            lambda scope: services.pipeline.catalog.names(scope.tenant_id),
            Gatehouse(services),
            secure_cookies=services.settings.public_url.startswith("https://"),
            single_sign_on=bool(services.settings.oidc_issuer),
        )
    )
