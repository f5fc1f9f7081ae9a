"""An estimate of the cached tokens that a prompt owes to prompt order.

A prefix cache hits up to the first difference. Requests of one application differ in the order that
they are sent in, so without prompt order nothing after the first part that it moved would have hit.
The estimate counts the cached tokens after that part, with tokens in proportion to bytes.
"""

from typing import Any

import orjson

from gateway.inference.request import InferenceRequest
from gateway.prompts.prompt import Prompt


def unordered_prefix(given: InferenceRequest, prompt: Prompt) -> int | None:
    """Prompt tokens before the first part that prompt order changed; None if it changed nothing."""
    if prompt.order is None or ":" not in prompt.order:
        return None
    ordered = prompt.request
    before = [*(given.tools or ()), *(given.messages or ())]
    after = [*(ordered.tools or ()), *(ordered.messages or ())]
    sizes = [_size(part) for part in after]
    same = 0
    for ours, theirs, size in zip(after, before, sizes, strict=False):
        if ours != theirs:
            break
        same += size
    return len(prompt.ids) * same // max(1, sum(sizes))


def _size(part: dict[str, Any]) -> int:
    return len(orjson.dumps(part))
