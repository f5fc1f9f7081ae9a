"""Sends the workload's requests and tallies the responses of each tenant."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from gateway.cli.demo.workload import Body, TenantTraffic, Workload, as_completion
from gateway.prompts.rendering import NO_CHAT_TEMPLATE

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


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


ProgressCallback = Callable[[dict[str, Tally]], None]


async def send(
    url: str,
    model: str,
    workload: Workload,
    keys: dict[str, str],
    seconds: float,
    on_progress: ProgressCallback,
) -> dict[str, Tally]:
    """Send requests for `seconds`. `on_progress` is called once a second with the tallies so far."""
    tallies = {part.tenant: Tally() for part in workload.parts}
    timeout = aiohttp.ClientTimeout(total=seconds + 180)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        sender, stopped = _Sender(http, url, model), asyncio.Event()
        workers = [
            asyncio.create_task(
                sender.send_until(stopped, part, keys[part.tenant], tallies[part.tenant])
            )
            for part in workload.parts
            for _ in range(part.concurrency)
        ]
        first = workload.parts[0]
        await sender.send(workload.blocked, keys[first.tenant], tallies[first.tenant])
        for _ in range(max(1, round(seconds))):
            await asyncio.sleep(min(1.0, seconds))
            on_progress(tallies)
        stopped.set()
        await asyncio.gather(*workers)
    return tallies


@dataclass(slots=True)
class _Sender:
    http: aiohttp.ClientSession
    url: str
    model: str
    route: str = _CHAT  # a model without a chat template has only completions

    async def send_until(
        self, stopped: asyncio.Event, part: TenantTraffic, key: str, tally: Tally
    ) -> None:
        for body in part.bodies():
            if stopped.is_set():
                return
            wait_s = await self.send(body, key, tally)
            try:
                async with asyncio.timeout(max(wait_s, part.pause_s)):
                    await stopped.wait()
            except TimeoutError:
                continue

    async def send(self, body: Body, key: str, tally: Tally) -> float:
        """Send one request. Returns the seconds to wait before the next."""
        adapter = body.get("adapter")
        payload = {name: value for name, value in body.items() if name != "adapter"}
        payload["model"] = f"{self.model}:{adapter}" if adapter else self.model
        if self.route == _COMPLETIONS:
            payload = as_completion(payload)
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with self.http.post(
                f"{self.url}{self.route}", json=payload, headers=headers
            ) as answer:
                content = await answer.json()
                if answer.status == 200:
                    _count(tally, answer.headers["x-request-id"], content)
                    return 0.0
                if answer.status == 429:
                    tally.limited += 1
                    return float(answer.headers.get("retry-after-ms", "1000")) / 1000
                if content["error"]["code"] == NO_CHAT_TEMPLATE:
                    self.route = _COMPLETIONS
                    return await self.send(body, key, tally)
                if content["error"]["code"] == "content_filter":
                    tally.blocked += 1
                else:
                    tally.failed += 1
                return 1.0
        except (aiohttp.ClientError, TimeoutError):
            tally.failed += 1
            return 1.0


def _count(tally: Tally, request_id: str, content: Body) -> None:
    usage = content["usage"]
    tally.answered += 1
    tally.blocked += any(c["finish_reason"] == "content_filter" for c in content["choices"])
    tally.input_tokens += usage["prompt_tokens"]
    tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    tally.output_tokens += usage["completion_tokens"]
    tally.request_ids.add(request_id)
