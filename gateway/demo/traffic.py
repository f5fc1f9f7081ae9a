"""Sends the workload's requests and tallies the responses of each tenant."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from gateway.demo.cast import Body, Part, Script


@dataclass(slots=True)
class Tally:
    """Counts from the responses to one tenant."""

    answered: int = 0
    limited: int = 0
    blocked: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    request_ids: set[str] = field(default_factory=set)


Told = Callable[[dict[str, Tally]], None]


async def send(
    url: str, model: str, cast: Script, keys: dict[str, str], seconds: float, told: Told
) -> dict[str, Tally]:
    """Send requests for `seconds`. `told` is called once a second with the tallies so far."""
    tallies = {part.tenant: Tally() for part in cast.parts}
    timeout = aiohttp.ClientTimeout(total=seconds + 180)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        over = asyncio.Event()
        workers = [
            asyncio.create_task(_ask_on(http, url, model, part, keys[part.tenant], tallies, over))
            for part in cast.parts
            for _ in range(part.at_once)
        ]
        first = cast.parts[0]
        await _ask(http, url, model, cast.blocked, keys[first.tenant], tallies[first.tenant])
        for _ in range(max(1, round(seconds))):
            await asyncio.sleep(min(1.0, seconds))
            told(tallies)
        over.set()
        await asyncio.gather(*workers)
    return tallies


async def _ask_on(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    part: Part,
    key: str,
    tallies: dict[str, Tally],
    over: asyncio.Event,
) -> None:
    for body in part.bodies():
        if over.is_set():
            return
        wait_s = await _ask(http, url, model, body, key, tallies[part.tenant])
        try:
            async with asyncio.timeout(max(wait_s, part.pause_s)):
                await over.wait()
        except TimeoutError:
            continue


async def _ask(
    http: aiohttp.ClientSession, url: str, model: str, body: Body, key: str, tally: Tally
) -> float:
    """Send one request. Returns the seconds to wait before the next."""
    adapter = body.get("adapter")
    asked = {name: value for name, value in body.items() if name != "adapter"}
    asked["model"] = f"{model}:{adapter}" if adapter else model
    headers = {"authorization": f"Bearer {key}"}
    try:
        async with http.post(f"{url}/v1/chat/completions", json=asked, headers=headers) as answer:
            said = await answer.json()
            if answer.status == 200:
                _count(tally, answer.headers["x-request-id"], said)
                return 0.0
            if answer.status == 429:
                tally.limited += 1
                return float(answer.headers.get("retry-after-ms", "1000")) / 1000
            if said["error"]["code"] == "content_filter":
                tally.blocked += 1
            else:
                tally.failed += 1
            return 1.0
    except (aiohttp.ClientError, TimeoutError):
        tally.failed += 1
        return 1.0


def _count(tally: Tally, request_id: str, said: Body) -> None:
    usage = said["usage"]
    tally.answered += 1
    tally.blocked += any(c["finish_reason"] == "content_filter" for c in said["choices"])
    tally.input_tokens += usage["prompt_tokens"]
    tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    tally.output_tokens += usage["completion_tokens"]
    tally.request_ids.add(request_id)
