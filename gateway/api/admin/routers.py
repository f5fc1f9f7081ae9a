"""All routers of people and limits under `/admin/v1`, for the app to include."""

from gateway.api.admin import adapters, audit, keys, limits, members, roles, tenants

ROUTERS = (
    tenants.router,
    members.router,
    keys.router,
    limits.router,
    adapters.router,
    audit.router,
    roles.router,
)
