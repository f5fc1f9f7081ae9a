"""Images, audio and documents in a chat, for upstreams that declare `images`, `audio` or `documents`.

The gateway passes them on unread: they are neither screened nor counted, and the upstream's usage
bills them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from core.errors import BadRequest

Part = dict[str, Any]
KINDS: Mapping[str, str] = MappingProxyType(
    {"image_url": "images", "input_audio": "audio", "file": "documents"}
)
CAPABILITIES = frozenset(KINDS.values())
RESERVED_TOKENS = 2_000  # for each part, until the upstream reports what it counted
_OF_DOCUMENTS = ("title", "context", "citations")  # in addition to the source
_SCHEMES = ("https://", "data:image/")
_FIELDS = {
    "image_url": {"url", "detail"},
    "input_audio": {"data", "format"},
    "file": {"file_data", "file_id", "filename", "url", "context"},
}


def checked(where: str, kind: str, value: Any) -> Part:
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
    if kind == "file" and not {"file_data", "file_id", "url"} & value.keys():
        raise _wrong(where, "a file with file_data")
    return {"type": kind, kind: value}


def of_anthropic(where: str, source: Any) -> Part:
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


def document_of_anthropic(where: str, block: Mapping[str, Any]) -> Part:
    """The part of a `document` block, whose source holds base64 or text, or names a URL. `citations`
    stay with it, for a provider that makes them. A document of text is a part of text, which is
    screened and counted as one, and `document` says what else the block had."""
    source = block.get("source")
    given = source if isinstance(source, dict) else {}
    if given.get("type") == "text" and isinstance(given.get("data"), str):
        named = {name: block[name] for name in _OF_DOCUMENTS if block.get(name) is not None}
        return {"type": "text", "text": given["data"], "document": named}
    kind, file = given.get("type"), Part()
    if kind == "base64" and isinstance(given.get("data"), str):
        file["file_data"] = f"data:{given.get('media_type')};base64,{given['data']}"
    elif kind == "url":
        file["url"] = given.get("url")
    for name, to in (("title", "filename"), ("context", "context")):
        if block.get(name) is not None:
            file[to] = block[name]
    if not file.keys() & {"file_data", "url"}:
        raise _wrong(f"{where}.source", "of type base64, text or url")
    part = checked(f"{where}.source", "file", file)
    if (citations := block.get("citations")) is not None:
        part["file"]["citations"] = citations
    return part


def needed(media: Mapping[str, str]) -> dict[str, bool]:
    """The capabilities that these parts need, for `InferenceRequest.engine_parameters`."""
    return dict.fromkeys(media, True)


def _wrong(where: str, form: str) -> BadRequest:
    return BadRequest(
        f"{where} must be {form}.", next_step=f"Correct {where}.", param=where, code="invalid_value"
    )
