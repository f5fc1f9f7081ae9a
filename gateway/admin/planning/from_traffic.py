"""`tollhouse plan --from-traffic 7d`: the workload that was served, from the usage that was recorded."""

import re
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.usage.tables import HourlyUsage
from core.errors import BadRequest, NotFound

_PERIOD = re.compile(r"([1-9][0-9]{0,3})([dh])")
_HOUR_S = 3600


def period_of(text: str) -> timedelta:
    match = _PERIOD.fullmatch(text.strip())
    if match is None:
        raise BadRequest(
            f"--from-traffic is {text!r}.", next_step="Give days or hours, such as 7d or 24h."
        )
    count = int(match[1])
    return timedelta(days=count) if match[2] == "d" else timedelta(hours=count)


def traffic(session: Session, model: str, since: datetime) -> dict[str, Any]:
    """Of the busiest hour: requests a second and tokens of a request; NotFound without traffic."""
    sums = [
        func.sum(getattr(HourlyUsage, name))
        for name in ("requests", "input_tokens", "cached_tokens", "output_tokens")
    ]
    query = (
        select(HourlyUsage.at, *sums)
        .where(HourlyUsage.at >= since, HourlyUsage.model == model)
        .group_by(HourlyUsage.at)
    )
    hours = [tuple(int(each or 0) for each in row[1:]) for row in session.execute(query)]
    busy = [each for each in hours if each[0]]
    if not busy:
        raise NotFound(
            f"No usage of {model!r} is recorded since {since:%Y-%m-%d %H:%M} UTC.",
            next_step="Name the model as `tollhouse model list` does, or give a longer period.",
        )
    requests, prompt, cached, output = (sum(each[place] for each in busy) for place in range(4))
    peak = max(each[0] for each in busy)
    return {
        "hours": len(busy),
        "requests": requests,
        "rate": peak / _HOUR_S,
        "prompt": max(1.0, prompt / requests),
        "shared_prefix": cached / requests,
        "output": max(1.0, output / requests),
    }
