"""The erasure of an end user in every store of the gateway, as the route and the command do it."""

from billing.archive.erasure import erase_end_user as erase_name
from core.clock import Clock
from core.database import Database
from core.erasures import erase_end_user as erase_texts
from core.sealing import Sealer
from core.tenants.organisations import erase_cached_responses
from core.tenants.scope import TenantScope

MOST_ERASURES = 4  # of a tenant, running and waiting, in a process


def erase_everywhere(
    database: Database, scope: TenantScope, clock: Clock, operator_token: str, end_user: str
) -> dict[str, int]:
    """What was erased, by kind. BadRequest for an empty name. Cached answers do not say whose they
    are, so those of the whole tenant go."""
    with database.transaction() as session:
        usage = erase_name(session, scope, clock, end_user)
    texts = erase_texts(database, scope, clock, Sealer(operator_token), end_user)
    with database.transaction() as session:
        erase_cached_responses(session, scope, clock)
    return {**usage.describe(), **texts}
