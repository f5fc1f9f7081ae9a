"""The requests: five surfaces, streamed and whole, two upstream kinds, and a third that fails.

A third of them ends in one of `FAILURES`, each as often as the others; the rest is answered by an
upstream that cuts, merges, delays and misreports its chunks.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.scripted_upstream import REPORTS, Plan

WITH_TOKENIZER, WITHOUT = "counted", "estimated"
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
)
_OF_UPSTREAM = ("cut", "error", "garbage", "silent", "refused", "busy", "down", "gone")
FAILURES = (
    *(f"upstream: {each}" for each in _OF_UPSTREAM),
    "client: leaves before the answer",
    "client: leaves in the answer",
    "time-out",
    "body: not JSON",
    "body: wrong parameter",
    "body: too long",
    "model: unknown",
    "key: unknown",
    "limit: reached",
    "budget: spent",
    "policy: blocked",
)
BLOCKED = "unspeakable-word"  # that the policy of the benchmark's tenant denies
_TIMEOUT_MS = 400


@dataclass(frozen=True, slots=True)
class Asked:
    number: int
    route: str
    body: bytes
    headers: dict[str, str]
    stream: bool
    failure: str  # "" if it is to succeed
    leaves: str = ""  # before, in: when the client goes away


@dataclass(frozen=True, slots=True)
class Keys:
    plain: str
    limited: str  # that may ask once a minute
    spent: str  # of a project without money
    failing: str  # of the tenant whose requests the upstreams fail


@dataclass(slots=True)
class _Draft:
    plan: Plan
    model: str
    key: str
    words: str = "Tell me of the gate"
    most: int = 60  # tokens
    timeout_ms: int = 0
    leaves: str = ""
    changes: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    raw: bytes | None = None


def asked(number: int, keys: Keys) -> Asked:
    """The same for the same number."""
    chance = random.Random(number)
    route = chance.choice(ROUTES)
    stream = chance.random() < 0.5 and route != ROUTES[-1]
    draft = _Draft(_plan(chance), chance.choice((WITH_TOKENIZER, WITHOUT)), keys.plain)
    failure = ""
    if number % 3 == 0:
        failure = FAILURES[number // 3 % len(FAILURES)]
        _fail(draft, failure, keys, chance)
    body = _body(route, draft, stream)
    for change in draft.changes:
        change(body)
    headers = {"authorization": f"Bearer {draft.key}", "content-type": "application/json"}
    if draft.timeout_ms:
        headers["x-request-timeout-ms"] = str(draft.timeout_ms)
    raw = json.dumps(body).encode() if draft.raw is None else draft.raw
    return Asked(number, route, raw, headers, stream, failure, draft.leaves)


def _plan(chance: random.Random) -> Plan:
    return Plan(
        words=chance.randint(1, 12),
        merge=chance.randint(1, 5),
        piece=chance.choice((0, 0, 0, 7, 40)),
        delay_ms=chance.choice((0, 0, 0, 0, 2)),
        report=chance.choice(REPORTS),
        ending=chance.choice(("stop", "length", "undone")),
    )


def _fail(draft: _Draft, failure: str, keys: Keys, chance: random.Random) -> None:
    kind, _, detail = failure.partition(": ")
    plan = draft.plan
    if kind == "upstream":
        draft.key = keys.failing
        draft.plan = Plan(plan.words, plan.merge, plan.piece, plan.delay_ms, plan.report, detail)
        draft.timeout_ms = _TIMEOUT_MS if detail == "silent" else 0
    elif kind == "client":
        draft.leaves = "before" if "before" in detail else "in"
        draft.plan = Plan(40, 1, 0, 5, plan.report, plan.ending)
    elif kind == "time-out":
        draft.plan = Plan(40, 1, 0, 30, plan.report, plan.ending)
        draft.timeout_ms = _TIMEOUT_MS
    elif failure == "body: not JSON":
        draft.raw = b'{"model": '
    elif failure == "body: wrong parameter":
        draft.changes.append(lambda body: body.update(temperature="hot", dimensions=-1))
    elif failure == "body: too long":
        draft.words = "gate " * 20_000
    elif kind == "model":
        draft.changes.append(lambda body: body.update(model="no-such-model"))
    elif kind == "policy":
        draft.words = f"Say {BLOCKED} to me"
    else:
        of_key = {"key": f"sk-{chance.getrandbits(64):x}", "limit": keys.limited}
        draft.key = of_key.get(kind, keys.spent)


def _body(route: str, draft: _Draft, stream: bool) -> dict[str, Any]:
    text = f"{draft.words} {draft.plan}"
    body: dict[str, Any] = {"model": draft.model, "stream": stream}
    if route == "/v1/embeddings":
        return {"model": draft.model, "input": ["a gate", text]}
    if route == "/v1/responses":
        return body | {"input": text, "max_output_tokens": draft.most}
    if route == "/v1/completions":
        body |= {"prompt": text}
    else:
        body |= {"messages": [{"role": "user", "content": text}]}
    if stream and route != "/v1/messages":
        body["stream_options"] = {"include_usage": True}
    return body | {"max_tokens": draft.most}
