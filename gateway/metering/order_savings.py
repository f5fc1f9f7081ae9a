"""An estimate of the cached tokens that a prompt owes to prompt order.

A prefix cache hits up to the first difference. The prompts of a tenant, as they were given, are kept
as hashes of their parts (tools, then messages): a part would have been cached if an earlier prompt
began with the same parts up to it, or if prompt order left all parts up to it in place. What was
cached beyond that is owed to prompt order. Tokens are counted in proportion to bytes, and each process
knows only the prompts that it served.
"""

from collections import OrderedDict

import orjson

from gateway.inference.request import InferenceRequest
from gateway.prompts.prompt import Prompt

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
        prefix, size, cached = hash(owner), 0, 0
        in_place = known = True
        for index, part in enumerate(before):
            text = orjson.dumps(part)
            prefix, size = hash((prefix, text)), size + len(text)
            in_place = in_place and index < len(after) and part == after[index]
            known = self._is_known(prefix) and known
            if in_place or known:
                cached = size
        while len(self._seen) > _MAX_PARTS:
            self._seen.popitem(last=False)
        return len(prompt.ids) * cached // max(1, size)

    def _is_known(self, prefix: int) -> bool:
        """Whether the prefix was seen before; from now on it was."""
        known = prefix in self._seen
        self._seen[prefix] = None
        if known:
            self._seen.move_to_end(prefix)
        return known
