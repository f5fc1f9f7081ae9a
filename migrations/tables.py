"""The shared metadata. Importing this module registers every package's tables in it."""

import importlib

from core.database import Base

MODEL_MODULES = (
    "core.tenants.models",
    "core.dead_letter_models",
    "core.heartbeat_models",
    "core.batches.models",
    "core.idempotency",
    "core.responses.models",
    "core.engine_drains",
    "billing.accounts.tables",
    "billing.adjustments.tables",
    "billing.archive.tables",
    "billing.audit.tables",
    "billing.bank.tables",
    "billing.exports.tables",
    "billing.invoicing.tables",
    "billing.ledger.tables",
    "billing.notices.tables",
    "billing.organisations.tables",
    "billing.payments.tables",
    "billing.pricing.tables",
    "billing.rating.tables",
    "billing.reports.tables",
    "billing.restores.tables",
    "billing.subscriptions.tables",
    "billing.taxes.tables",
    "billing.usage.tables",
    "moderation.models",
)

for _name in MODEL_MODULES:
    importlib.import_module(_name)

metadata = Base.metadata
