"""Runs one transaction per tenant, so that a failure leaves out that tenant alone."""

import logging
from collections.abc import Callable, Iterable

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from core import metrics
from core.database import Database

log = logging.getLogger("tollhouse.billing")


def each_tenant(
    database: Database,
    task: str,
    tenant_ids: Iterable[str],
    work: Callable[[Session, str], int],
) -> int:
    """The sum of what `work` returns. A lost database ends the run; the task is retried."""
    done = 0
    for tenant_id in tenant_ids:
        try:
            with database.transaction() as session:
                done += work(session, tenant_id)
        except Exception as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise
            log.exception("%s left out %s: %s", task, tenant_id, error)
            metrics.tenant_failures.labels(task).inc()
    return done
