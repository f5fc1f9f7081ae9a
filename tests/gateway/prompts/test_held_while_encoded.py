"""The limits on requests are held for prompts whose encoding is work, and for no others."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import ContextLengthExceeded
from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.tokenizing import load_codec
from gateway.prompts.prompt import prepare
from gateway.request.inference import InferenceRequest

OWNER: Any = SimpleNamespace(tenant_id="org_a", settings={})
CODEC = load_codec(MODEL_DIR)


class Held:
    def __init__(self) -> None:
        self.entered = 0
        self.refused = 0

    def __call__(self) -> AbstractAsyncContextManager[None]:
        return self._hold()

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        self.entered += 1
        try:
            yield
        except BaseException:
            self.refused += 1
            raise


def conversation(turns: int, last: str, **given: Any) -> InferenceRequest:
    roles = ("user", "assistant")
    messages = [
        {"role": roles[number % 2], "content": f"{number}. {'A toll is paid at the gate. ' * 20}"}
        for number in range(turns)
    ]
    messages.append({"role": "user", "content": last})
    return InferenceRequest("/v1/chat/completions", "demo", messages, **given)


async def test_a_known_conversation_goes_on_without_a_hold() -> None:
    held = Held()
    first = await prepare(conversation(30, "And now?"), CODEC, 20_000, OWNER, held)
    assert held.entered == 1, "a new conversation is work"
    again = await prepare(conversation(30, "And then?"), CODEC, 20_000, OWNER, held)
    assert held.entered == 1
    assert first.ids != again.ids and len(first.ids) > 2_000
    tokenizer, text = CODEC.tokenizer, CODEC.decode(again.ids, special=True)
    assert tokenizer.encode(text, add_special_tokens=False).ids == again.ids


@pytest.mark.parametrize(
    "request_",
    [
        conversation(30, "Too long in the end?", max_tokens=19_000),
        InferenceRequest("/v1/completions", "demo", prompts=("toll " * 30_000,)),
        InferenceRequest("/v1/completions", "demo", prompts=("toll " * 700, "gate " * 30_000)),
    ],
)
async def test_a_long_prompt_is_refused_within_the_hold(request_: InferenceRequest) -> None:
    fresh, held = load_codec(MODEL_DIR), Held()
    with pytest.raises(ContextLengthExceeded):
        await prepare(request_, fresh, 20_000, OWNER, held)
    assert (held.entered, held.refused) == (1, 1)
