"""One plan for the route and the page: the model by name, the deployment's price, the curve."""

from typing import Any

from core.clock import Clock
from core.database import Database
from core.errors import BadRequest
from core.settings import Settings
from engine.errors import EngineError
from engine.planning.plan import answers
from gateway.admin.planning import report
from gateway.admin.planning.own_prices import sold_at
from gateway.admin.planning.question import (
    Described,
    PlanOptions,
    model_by_name,
    model_of_file,
    question_of,
    unknown_model,
)
from gateway.catalog.model_files import model_name
from gateway.catalog.model_source import local_copy


def plan(
    options: PlanOptions, settings: Settings, database: Database, clock: Clock
) -> dict[str, Any]:
    """BadRequest says which option cannot be. Call it from a worker thread."""
    question = question_of(options, _model(options.model, settings))
    try:
        found = answers(question)
    except EngineError as error:
        raise BadRequest(
            error.message, next_step="Correct the option that the message names."
        ) from None
    with database.read() as session:
        sold = sold_at(session, options.model, clock.now())
    return report.described(question, found, sold) | {"curve": report.curve(found[0])}


def _model(name: str, settings: Settings) -> Described:
    """A published model, or the one that this deployment serves; no other file of this machine."""
    found = model_by_name(name)
    if found is not None:
        return found
    copy = local_copy(settings.model, settings.data_dir) if name == model_name(settings) else None
    if copy is None:
        raise unknown_model(name)
    return model_of_file(copy)
