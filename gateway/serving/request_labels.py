"""The labels of a request: of its `metadata` those that its project lists, and those of a header."""

from core import labels
from core.errors import BadRequest, UnsupportedParameter
from core.tenants.keys import Principal
from gateway.request.exchange import Exchange
from gateway.request.inference import InferenceRequest

_HEADER = labels.HEADER.encode()


def labels_of(
    principal: Principal, exchange: Exchange, request: InferenceRequest | None = None
) -> str | None:
    """Their canonical form. BadRequest for a header with a name that the project does not list; other
    names of `metadata` belong to what is stored."""
    header = exchange.header(_HEADER)
    metadata = request.metadata if request is not None else None
    if header is None and not metadata:
        return None
    listed = principal.label_keys
    if request is not None and metadata and _is_kept_nowhere(request):
        _check_metadata(metadata, listed)
    found = {key: value for key, value in (metadata or {}).items() if key in listed}
    if not found and header is None:
        return None
    if header is None:
        return labels.canonical(found, "metadata")
    named = labels.parse_header(header)
    for key in named:
        if key not in listed:
            raise BadRequest(
                f"{key[:40]!r} is not a label of this project.",
                next_step=_how_to_list(listed),
                param=labels.HEADER,
                code="invalid_value",
            )
    return labels.canonical(found | named, labels.HEADER)


def _is_kept_nowhere(request: InferenceRequest) -> bool:
    """Whether its metadata has no use but labels: a chat that is not stored."""
    return "store" not in request.extra and "metadata" not in request.extra


def _check_metadata(metadata: dict[str, str], listed: tuple[str, ...]) -> None:
    for key in metadata:
        if key not in listed:
            raise UnsupportedParameter(
                f"metadata has {key[:40]!r}, which belongs to a stored completion, and this one is not "
                "to be stored.",
                next_step=f"Send store: true, or remove it. {_how_to_list(listed)}",
                param="metadata",
            )


def _how_to_list(listed: tuple[str, ...]) -> str:
    if listed:
        return f"Its labels are {', '.join(listed)}."
    return "It has no labels yet: an admin lists them on the page of projects."
