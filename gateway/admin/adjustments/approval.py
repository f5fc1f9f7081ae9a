"""Submits acts on money from the command line."""

from pathlib import Path

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest
from billing.adjustments.money_acts import FourEyes
from billing.adjustments.tables import MoneyAct
from billing.payments import dunning
from core.tenants import operators
from gateway.admin.console.context import CommandContext
from gateway.admin.console.output import say

# A user of this machine has the deployment's own token, so both are one person.
OPERATOR = "operator"


def submit(tools: CommandContext, asked: ActRequest, token_file: Path | None = None) -> MoneyAct:
    rule = FourEyes.of(tools.settings.four_eyes_above)
    with tools.database.transaction() as session:
        act = money_acts.submit(session, tools.clock, asked, actor(tools, token_file), rule)
    if act.status == money_acts.WAITING:
        say(
            f"Nothing is posted yet: {act.id} waits for a second operator (tollhouse money confirm)."
        )
    else:
        dunning.settle(tools.database, tools.clock)
    return act


def actor(tools: CommandContext, token_file: Path | None) -> str:
    """The operator whose token is in the file; the deployment's own without one."""
    if token_file is None:
        return OPERATOR
    with tools.database.read() as session:
        return operators.actor_of(operators.find(session, token_file.read_text().strip())).id
