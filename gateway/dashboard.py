"""Mounts the dashboard on this gateway's services."""

from dashboards.app import Asgi, create_dashboard
from dashboards.viewer import DashboardDeps
from gateway.auth.dashboard_auth import DashboardAuth
from gateway.dashboard_backend import DashboardBackend
from gateway.wiring import Services


def make_dashboard(services: Services) -> Asgi:
    dashboard_auth = DashboardAuth(
        services.roles,
        services.pipeline.auth.attempts,
        services.clock,
        services.operator_token,
    )
    return create_dashboard(
        DashboardDeps(
            services.database,
            services.clock,
            dashboard_auth,
            lambda scope: services.pipeline.catalog.names(scope.tenant_id),
            DashboardBackend(services),
            secure_cookies=services.settings.public_url.startswith("https://"),
            single_sign_on=bool(services.settings.oidc_issuer),
        )
    )
