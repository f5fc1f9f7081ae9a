"""Every page's routes in one list, in the order of the navigation."""

from starlette.routing import BaseRoute

from dashboards.pages import costs, invoices, keys, listings, overview, playground, signin, usage

ROUTES: list[BaseRoute] = [
    *signin.ROUTES,
    *overview.ROUTES,
    *usage.ROUTES,
    *costs.ROUTES,
    *keys.ROUTES,
    *invoices.ROUTES,
    *playground.ROUTES,
    *listings.ROUTES,
]
