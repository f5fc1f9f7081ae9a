"""The routes of all pages."""

from starlette.routing import BaseRoute

from dashboards import theme
from dashboards.pages import (
    adapters,
    costs,
    exports,
    invoices,
    keys,
    limits,
    overview,
    payment_methods,
    playground,
    policy,
    projects,
    requests,
    safety,
    sign_in,
    team,
    usage,
    webhooks,
)
from dashboards.pages.operator import (
    dead_letters,
    engines,
    health,
    ledger,
    margin,
    prices,
    reconciliation,
    revenue,
    seller,
    tenants,
)
from dashboards.pages.operator import safety as safety_queue

ROUTES: list[BaseRoute] = [
    *sign_in.ROUTES,
    *theme.ROUTES,
    *overview.ROUTES,
    *usage.ROUTES,
    *costs.ROUTES,
    *projects.ROUTES,
    *keys.ROUTES,
    *invoices.ROUTES,
    *payment_methods.ROUTES,
    *playground.ROUTES,
    *requests.ROUTES,
    *adapters.ROUTES,
    *limits.ROUTES,
    *exports.ROUTES,
    *webhooks.ROUTES,
    *safety.ROUTES,
    *policy.ROUTES,
    *team.ROUTES,
    *tenants.ROUTES,
    *revenue.ROUTES,
    *ledger.ROUTES,
    *margin.ROUTES,
    *reconciliation.ROUTES,
    *prices.ROUTES,
    *seller.ROUTES,
    *engines.ROUTES,
    *safety_queue.ROUTES,
    *dead_letters.ROUTES,
    *health.ROUTES,
]
