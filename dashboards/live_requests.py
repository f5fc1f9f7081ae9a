"""The live list of requests: rows as server-sent events, as the requests are shipped.

A message's id is the batch of its row, so that a connection that was lost goes on where it ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from core.clock import Clock
from core.database import Database
from dashboards import cells, request_log
from dashboards.request_log import LogQuery, LogRow
from dashboards.tables import Table

_EVERY_S = 1.0
_LIFE_S = 25.0  # then the browser connects again, and signs in again by that
_REMEMBERED = 1_000  # rows that were sent
_KEPT_ALIVE = ": nothing new\n\n"

ToTable = Callable[[list[LogRow]], Table]


def live_response(
    request: Request, database: Database, clock: Clock, log_query: LogQuery, to_table: ToTable
) -> Response:
    given = request.headers.get("last-event-id", "")
    since = int(given) if given.isascii() and given.isdigit() else None
    sent: deque[str] = deque(maxlen=_REMEMBERED)

    def _read(batch: int | None) -> tuple[int, list[LogRow]]:
        with database.read() as session:
            last = request_log.last_batch(session)
            if batch is None:
                sent.extend(_ids(request_log.arrived(session, log_query, last)))
                return last, []
            found = request_log.arrived(session, log_query, batch)
            session.expunge_all()
        return last, [row for row in found if row[0].request_id not in sent]

    async def _messages() -> AsyncIterator[str]:
        batch, until = since, clock.monotonic() + _LIFE_S
        yield "retry: 1000\n\n"
        while clock.monotonic() < until and not await request.is_disconnected():
            batch, rows = await run_in_threadpool(_read, batch)
            sent.extend(_ids(rows))
            drawn = cells.lines(to_table(rows), clock.now())
            for line in drawn:
                row = "".join(str(cell) for cell in line)
                yield f"id: {batch}\ndata: <tr>{row}</tr>\n\n"
            if not drawn:
                yield _KEPT_ALIVE
            await asyncio.sleep(_EVERY_S)

    headers = {"x-accel-buffering": "no"}
    return StreamingResponse(_messages(), media_type="text/event-stream", headers=headers)


def _ids(rows: list[LogRow]) -> list[str]:
    return [event.request_id for event, _ in rows]
