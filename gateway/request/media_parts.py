"""Image and audio parts of a chat, for upstreams that declare `images` or `audio`.

The gateway passes them on unread: they are neither screened nor counted, and the upstream's usage
bills them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from core.errors import BadRequest

KINDS: Mapping[str, str] = MappingProxyType({"image_url": "images", "input_audio": "audio"})
CAPABILITIES = frozenset(KINDS.values())
RESERVED_TOKENS = 2_000  # for each part, until the upstream reports what it counted
_SCHEMES = ("https://", "data:image/")
_FIELDS = {"image_url": {"url", "detail"}, "input_audio": {"data", "format"}}


def checked(where: str, kind: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str) and kind == "image_url":
        value = {"url": value}
    if not isinstance(value, dict) or not all(
        name in _FIELDS[kind] and isinstance(each, str) for name, each in value.items()
    ):
        raise _wrong(where, f"an object with {' and '.join(sorted(_FIELDS[kind]))}")
    if kind == "image_url" and not str(value.get("url")).startswith(_SCHEMES):
        raise _wrong(where, "an image with a data: or https: URL")
    if kind == "input_audio" and not value.get("data"):
        raise _wrong(where, "audio with data")
    return {"type": kind, kind: value}


def of_anthropic(where: str, source: Any) -> dict[str, Any]:
    """The part of an `image` block: its source holds base64 or names a URL."""
    given = source if isinstance(source, dict) else {}
    kind, names = given.get("type"), set(given)
    url: Any = None
    if kind == "base64" and names == {"type", "media_type", "data"}:
        url = f"data:{given['media_type']};base64,{given['data']}"
    elif kind == "url" and names == {"type", "url"}:
        url = given["url"]
    if not isinstance(url, str):
        raise _wrong(f"{where}.source", "of type base64 with media_type and data, or url with url")
    return checked(f"{where}.source", "image_url", url)


def needed(media: Mapping[str, str]) -> dict[str, bool]:
    """The capabilities that these parts need, for `InferenceRequest.engine_parameters`."""
    return dict.fromkeys(media, True)


def _wrong(where: str, form: str) -> BadRequest:
    return BadRequest(
        f"{where} must be {form}.", next_step=f"Correct {where}.", param=where, code="invalid_value"
    )
