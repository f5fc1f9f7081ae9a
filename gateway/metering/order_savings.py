"""An estimate of the cached tokens that a prompt owes to prompt order.

A prefix cache hits up to the first difference. The prompts of a tenant, as they were given, are kept
as hashes of their parts (tools, then messages): a part would have been cached if an earlier prompt
began with the same parts up to it, or if prompt order left all parts up to it in place. What was
cached beyond that is owed to prompt order. Tokens are counted in proportion to bytes, and each process
knows only the prompts that it served.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate, takewhile
from operator import eq

import orjson

from gateway.prompts.prompt import Prompt
from gateway.request.inference import InferenceRequest

_MAX_PARTS = 100_000


class GivenOrders:
    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes of prefixes, oldest use first

    def cached_tokens(
        self, owner: tuple[str | None, ...], given: InferenceRequest, prompt: Prompt
    ) -> int | None:
        """Prompt tokens that a cache would have held for the given order; None if prompt order changed
        nothing. `owner` names the cache: tenant, model and adapter."""
        if prompt.order is None or ":" not in prompt.order:
            return None
        ordered = prompt.request
        before = [*(given.tools or ()), *(given.messages or ())]
        after = [*(ordered.tools or ()), *(ordered.messages or ())]
        texts = list(map(orjson.dumps, before))
        prefixes = [*accumulate(texts, _prolonged, initial=hash(owner))][1:]
        in_place = _leading(map(eq, before, after))
        known = _leading(map(self._seen.__contains__, prefixes))
        self._note(prefixes)
        sizes = [0, *accumulate(map(len, texts))]
        return len(prompt.ids) * sizes[max(in_place, known)] // max(1, sizes[-1])

    def _note(self, prefixes: list[int]) -> None:
        """From now on they were seen before."""
        self._seen.update(dict.fromkeys(prefixes))
        for prefix in prefixes:
            self._seen.move_to_end(prefix)
        while len(self._seen) > _MAX_PARTS:
            self._seen.popitem(last=False)


def _prolonged(prefix: int, text: bytes) -> int:
    return hash((prefix, text))


def _leading(answers: Iterable[bool]) -> int:
    """How many of the answers come before the first that is no."""
    return len(list(takewhile(bool, answers)))
