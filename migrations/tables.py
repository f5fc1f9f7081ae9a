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
    "billing.models",
    "moderation.models",
)

for _name in MODEL_MODULES:
    importlib.import_module(_name)

metadata = Base.metadata
