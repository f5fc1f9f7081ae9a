"""All routers under `/admin/v1`, for the app to include."""

from gateway.admin.accounts import routes as billing_admin
from gateway.admin.adapters import routes as adapters
from gateway.admin.adjustments import routes as money_acts
from gateway.admin.audit import routes as audit
from gateway.admin.bank import routes as bank
from gateway.admin.billing import routes as billing
from gateway.admin.engines import routes as engines
from gateway.admin.exports import routes as exports
from gateway.admin.finance import routes as finance
from gateway.admin.keys import routes as keys
from gateway.admin.ledger import routes as ledger
from gateway.admin.limits import routes as limits
from gateway.admin.members import routes as members
from gateway.admin.openai_admin import routes as openai_admin
from gateway.admin.operators import routes as operators
from gateway.admin.organisations import routes as organisations
from gateway.admin.payments import routes as payments
from gateway.admin.planning import routes as planning
from gateway.admin.policies import routes as policies
from gateway.admin.prices import routes as exchange_rates
from gateway.admin.prompts import routes as prompts
from gateway.admin.stored_data import routes as stored_data
from gateway.admin.subscriptions import routes as subscriptions
from gateway.admin.taxes import routes as taxes
from gateway.admin.tenants import routes as tenants
from gateway.admin.usage import routes as reported_usage

ROUTERS = (
    tenants.router,
    organisations.router,
    members.router,
    keys.router,
    limits.router,
    adapters.router,
    audit.router,
    policies.router,
    members.role_router,
    members.sign_on_router,
    billing.router,
    payments.router,
    bank.router,
    billing_admin.router,
    subscriptions.router,
    ledger.router,
    finance.margin_router,
    exchange_rates.router,
    money_acts.router,
    finance.month_router,
    operators.router,
    reported_usage.router,
    taxes.router,
    exports.router,
    engines.router,
    planning.router,
    tenants.response_cache_router,
    tenants.request_log_router,
    prompts.router,
    stored_data.router,
    openai_admin.router,
)
