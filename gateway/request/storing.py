"""Whether an organisation allows its responses and completions to be stored."""

from core.errors import BadRequest
from core.tenants.keys import Principal

SETTING = "store_responses"  # of a tenant; false: nothing is stored


def may_store(principal: Principal) -> bool:
    return principal.settings.get(SETTING, True) is not False


def check_may_store(principal: Principal) -> None:
    if not may_store(principal):
        raise BadRequest(
            "The organisation's settings do not allow storing completions.",
            next_step="Set store to false.",
            param="store",
            code="store_not_allowed",
        )
