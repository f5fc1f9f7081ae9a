"""Scheduled tasks of moderation: strike rules, retention and the daily summary."""

import logging
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select

from core.queue import TaskContext, task
from core.tenants.scope import scope_of_operator
from moderation.models import Decision
from moderation.records import forget_before
from moderation.strikes import apply_rules

log = logging.getLogger("tollhouse.moderation")

_BATCHES = 200


@task("moderation.apply_strikes", every_s=60)
def apply_strikes(context: TaskContext) -> list[str]:
    """Suspend the keys that meet their strike rule."""
    with context.database.transaction() as session:
        suspended = apply_rules(session, context.clock, scope_of_operator)
    if suspended:
        log.warning("%d keys were suspended by the strike rule", len(suspended))
    return suspended


@task("moderation.forget", every_s=3_600, time_limit_s=600)
def forget(context: TaskContext) -> int:
    """Delete decisions older than TOLLHOUSE_MODERATION_RETENTION_DAYS, in small transactions."""
    days = context.settings.moderation_retention_days
    moment = context.clock.now() - timedelta(days=days)
    deleted = 0
    for _ in range(_BATCHES):
        with context.database.transaction() as session:
            count = forget_before(session, moment)
        deleted += count
        if not count:
            break
    return deleted


@task("moderation.digest", every_s=86_400)
def digest(context: TaskContext) -> dict[str, Any]:
    """Count the last day's decisions by tenant and action; logs only the totals."""
    since = context.clock.now() - timedelta(days=1)
    query = (
        select(Decision.tenant_id, Decision.action, func.count())
        .where(Decision.at >= since)
        .group_by(Decision.tenant_id, Decision.action)
    )
    found: dict[str, dict[str, int]] = {}
    with context.database.read() as session:
        for tenant_id, action, number in session.execute(query):
            found.setdefault(tenant_id, {})[action] = number
    blocked = sum(actions.get("block", 0) for actions in found.values())
    log.info("moderation in the last day: %d tenants, %d blocked", len(found), blocked)
    return found
