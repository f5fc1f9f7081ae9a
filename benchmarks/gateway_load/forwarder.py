"""The ceiling of one Python worker: FastAPI and aiohttp, forwarding and nothing else."""

import os
from collections.abc import AsyncIterator

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app = FastAPI()
_sessions: list[aiohttp.ClientSession] = []


@app.post("/v1/chat/completions")
async def forward(request: Request) -> Response:
    if not _sessions:
        _sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    body = await request.body()
    url = os.environ["UPSTREAM"] + "/v1/chat/completions"
    headers = {"content-type": "application/json"}
    if b'"stream": true' not in body:
        async with _sessions[0].post(url, data=body, headers=headers) as answer:
            return Response(await answer.read(), media_type="application/json")
    answer = await _sessions[0].post(url, data=body, headers=headers)

    async def _lines() -> AsyncIterator[bytes]:
        async for line in answer.content:
            yield line
        answer.release()

    return StreamingResponse(_lines(), media_type="text/event-stream")
