"""What prompt order saves: the cached share of input tokens with `off`, `safe` and `full`.

Agents call again and again, each with tools whose order comes shuffled (as sets and hash maps give
them) and a system prompt that opens with the date and time. The bodies go through the gateway's own
parsing, ordering, template and tokenizer, one after the other, to a real engine with a real model
(the demo model by default); what is counted is what its receipts say. Counts, not times: the machine
does not matter.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.report import figure, progress
from core.tenants.key_scopes import KeyScopes
from core.tenants.keys import Principal
from core.tenants.plans import PLANS
from core.tenants.scope import scope_of_operator
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.worker.server import make_runner
from gateway.catalog.codec.tokenizing import load_codec
from gateway.formats.chat.request import parse_chat
from gateway.prompts.prompt import prepare
from gateway.prompts.prompt_order import PromptOrder

CONTEXT = 4096
_START = datetime(2026, 11, 20, 9, 0, tzinfo=UTC)
_NOUNS = ("order", "invoice", "customer", "parcel", "ticket", "refund", "stock", "address")
_VERBS = ("find", "create", "cancel", "update", "list", "check")
_RULES = (
    "Answer in the language of the customer and keep to two short paragraphs.",
    "Never promise a date that no tool has given you.",
    "Ask for the number before you look anything up, and repeat it in your answer.",
    "If two tools could help, take the one that changes nothing first.",
    "Say what you did, what you found, and what the customer can do next.",
    "Pass complaints about colleagues on, and do not judge them yourself.",
    "Amounts are shown with two decimals and the currency after them.",
    "When a tool fails, try it once more and then say so plainly.",
)


class Agents:
    """Bodies of chat requests, in the order in which they come."""

    def __init__(self, agents: int, tools: int, seed: int) -> None:
        self._dice = random.Random(seed)
        self._tools = [self._toolbox(tools) for _ in range(agents)]
        self._rules = [self._dice.sample(_RULES, len(_RULES)) * 2 for _ in range(agents)]

    def bodies(self, calls: int) -> Iterator[bytes]:
        for number in range(calls):
            for agent in range(len(self._tools)):
                yield self._body(agent, number)

    def _body(self, agent: int, number: int) -> bytes:
        now = _START + timedelta(seconds=self._dice.uniform(0, 60) + 3600 * number)
        system = [
            {"type": "text", "text": f"It is {now:%A, %Y-%m-%d %H:%M:%S}.\n"},
            {"type": "text", "text": f"You are agent {agent} of a shop.\n" + self._text(agent)},
        ]
        question = f"Please {self._dice.choice(_VERBS)} my {self._dice.choice(_NOUNS)} "
        question += f"number {self._dice.randrange(10**6)}."
        body = {
            "model": "m",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            "tools": self._dice.sample(self._tools[agent], len(self._tools[agent])),
        }
        return json.dumps(body).encode()

    def _text(self, agent: int) -> str:
        return "\n".join(f"{n}. {rule}" for n, rule in enumerate(self._rules[agent], 1))

    def _toolbox(self, count: int) -> list[dict[str, Any]]:
        names = [f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS]
        return [self._tool(name) for name in self._dice.sample(names, count)]

    def _tool(self, name: str) -> dict[str, Any]:
        verb, noun = name.split("_")
        fields = {
            f"{noun}_number": {"type": "string", "description": f"Which {noun} to {verb}."},
            "reason": {"type": "string", "enum": ["asked", "late", "broken"]},
            "notify": {"type": "boolean"},
        }
        schema = {"type": "object", "properties": fields, "required": [f"{noun}_number", "reason"]}
        function = {"name": name, "description": f"{verb} the {noun}", "parameters": schema}
        return {"type": "function", "function": function}


def principal_of(order: PromptOrder) -> Principal:
    return Principal(
        scope=scope_of_operator("org_benchmark", "benchmark"),
        tenant_name="benchmark",
        key_id="key_benchmark",
        project_id="prj_benchmark",
        role="owner",
        scopes=KeyScopes(),
        allowed_ips=(),
        expires_at=None,
        plan=PLANS["free"],
        currency="USD",
        settings={"prompt_order": order.value},
    )


def measure(order: PromptOrder, bodies: list[bytes], model: Path) -> dict[str, float]:
    codec, principal = load_codec(model), principal_of(order)
    config = EngineConfig(model=str(model), kv_memory_bytes=1 << 28)
    engine = Engine(config, make_runner(config, fake=False))
    prompts = cached = 0
    for number, raw in enumerate(bodies):
        made = asyncio.run(prepare(parse_chat(raw), codec, CONTEXT, principal))
        sampling = SamplingParams(1, temperature=0.0)
        engine.submit(GenerateRequest(f"r{number}", principal.tenant_id, made.ids, sampling), "b")
        receipts = []
        while engine.busy:
            engine.step()
            for outbox in engine.take_outboxes().values():
                receipts += outbox.receipts
        (receipt,) = receipts
        prompts += receipt.prompt
        cached += receipt.cached
    engine.check_integrity()
    return {"input_tokens": prompts, "cached_tokens": cached, "share": cached / prompts}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="a checkpoint directory")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--calls", type=int, default=20, help="of each agent")
    parser.add_argument("--tools", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    bodies = list(Agents(options.agents, options.tools, options.seed).bodies(options.calls))
    found = {}
    for order in PromptOrder:
        found[order.value] = measure(order, bodies, options.model)
        progress(f"{order.value}: {found[order.value]}")
    settings = {**vars(options), "model": options.model.name, **found}
    for order in (PromptOrder.SAFE, PromptOrder.FULL):
        full = order is PromptOrder.FULL
        figure(
            f"prompt_order.cached_share_{order.value}",
            found[order.value]["share"],
            "share of input tokens",
            True,
            "off",
            found[PromptOrder.OFF]["share"],
            at_least=8.0 if full else None,
            aim=10.0 if full else None,
            settings=settings,
        )
    for order, at_least, aim in ((PromptOrder.OFF, 0.10, 0.05), (PromptOrder.FULL, 0.80, 0.90)):
        figure(
            f"prompt_order.share_{order.value}",
            found[order.value]["share"],
            "share of input tokens",
            order is PromptOrder.FULL,
            at_least=at_least,
            aim=aim,
            settings=settings,
        )


if __name__ == "__main__":
    main()
