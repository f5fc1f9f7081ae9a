"""Pages of items, of a stored response's request and of conversations."""

from collections.abc import Sequence
from typing import Any


def item_page(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: str
) -> dict[str, Any]:
    """`items` are in the order in which they were added."""
    found = [listed_item(each) for each in items]
    if order == "desc":
        found.reverse()
    ids = [each["id"] for each in found]
    begin = ids.index(after) + 1 if after in ids else 0
    page = found[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": begin + limit < len(found),
    }


def listed_item(item: dict[str, Any]) -> dict[str, Any]:
    """A message's content is a list of parts, also where the client wrote a text."""
    if isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": item["content"]}]}
    return {"type": "message", "status": "completed", **item}
