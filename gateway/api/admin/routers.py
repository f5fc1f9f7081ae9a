"""All routers under `/admin/v1`, for the app to include."""

from gateway.api.admin import (
    adapters,
    appeals,
    audit,
    billing,
    billing_admin,
    engines,
    exports,
    keys,
    limits,
    members,
    payments,
    policies,
    roles,
    subscriptions,
    taxes,
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
    appeals.router,
    roles.router,
    billing.router,
    payments.router,
    billing_admin.router,
    subscriptions.router,
    taxes.router,
    exports.router,
    engines.router,
)
