"""All routers of people, limits and money under `/admin/v1`, for the app to include."""

from gateway.api.admin import (
    adapters,
    audit,
    billing,
    counting_house,
    keys,
    limits,
    members,
    policies,
    roles,
    tenants,
)

ROUTERS = (
    tenants.router,
    members.router,
    keys.router,
    limits.router,
    adapters.router,
    audit.router,
    policies.router,
    roles.router,
    billing.router,
    counting_house.router,
)
