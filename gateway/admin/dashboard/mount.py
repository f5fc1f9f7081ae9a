"""Mounts the dashboard on this gateway's services."""

from dashboards.app import Asgi, create_dashboard
from dashboards.viewer import DashboardDeps
from gateway.admin.dashboard.backend import DashboardBackend
from gateway.serving.services import Services


def make_backend(services: Services) -> DashboardBackend:
    return DashboardBackend(
        settings=services.settings,
        clock=services.clock,
        database=services.database,
        counters=services.counters,
        router=services.router,
        adapters=services.adapters,
        policies=services.policies,
        card_pages=services.card_pages,
        spool_state=services.spool_state,
        is_draining=lambda: services.pipeline.draining,
        refresh_engines=services.engines.refresh,
        upstream_reload=services.upstream_reload,
    )


def make_dashboard(services: Services) -> Asgi:
    settings = services.settings
    return create_dashboard(
        DashboardDeps(
            services.database,
            services.clock,
            services.dashboard_auth,
            lambda scope: services.catalog.names(scope.tenant_id),
            make_backend(services),
            services.alert_targets,
            four_eyes_above=settings.four_eyes_above,
            secure_cookies=settings.public_url.startswith("https://"),
            single_sign_on=bool(settings.oidc_issuer),
            public_url=settings.public_url,
            tasks_since=None if settings.broker_url else services.clock.now(),
        )
    )
