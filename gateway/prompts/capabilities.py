"""Parameters that only some engines support. Where one is not supported, the request is refused."""

from collections.abc import Mapping
from operator import attrgetter

from msgspec.structs import replace

from core.errors import NotFound, UnsupportedParameter
from gateway.catalog.catalog import ServedModel
from gateway.edge.decoding import unknown_parameter
from gateway.request.inference import EXTRA, PASSED, InferenceRequest
from gateway.request.media_parts import CAPABILITIES

# The capability that an upstream must declare for each parameter in `InferenceRequest.engine_parameters`.
_NEEDS = {
    "tool_choice": "tools",
    "strict": "tools",
    "response_format": "json",
    "structured_outputs": "grammar",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "score": "score",
    "images": "images",
    "audio": "audio",
    "documents": "documents",
}
_RESPONSES = "/v1/responses"
_ROUTES = {"embeddings": "embeddings", "rerank": "/v1/rerank", "score": "/v1/score"}

# Of answers: an upstream's text has no token ids.
_BY_ID = ("return_tokens_as_token_ids", "return_token_ids")
_by_id, _NOT_BY_ID = attrgetter(*_BY_ID), (False, False)

_extra = attrgetter(*EXTRA)
_UNSET = tuple(EXTRA.values())


def check_sampling_parameters(ask: InferenceRequest, model: ServedModel) -> None:
    """Raise UnsupportedParameter for a sampling parameter that the model's upstream lacks."""
    if ask.extra_fields:
        for name in ask.extra_fields.keys() - model.extra_fields:
            if name not in PASSED:
                raise unknown_parameter(name)
            shown = ask.extra.get("named", {}).get(name, name)
            raise UnsupportedParameter(
                f"{shown} is not supported by {model.name}.",
                next_step=f"Remove {shown}; an operator can list {name} in the upstream's extra_fields.",
                param=shown,
            )
    if model.parameters is None:
        _check_own_engine(ask, model)
        return
    if ask.prompt_logprobs is not None:
        shown = "echo with logprobs" if ask.echo else "prompt_logprobs"
        raise UnsupportedParameter(
            f"{model.name} does not support {shown}: its upstream is not asked for log-probabilities "
            "of prompt tokens.",
            next_step="Leave it out, or use a model of the built-in engine.",
            param="echo" if ask.echo else "prompt_logprobs",
        )
    own_engine: Mapping[str, object] | None = ask.extra.get("own_engine")
    if own_engine or _by_id(ask) != _NOT_BY_ID:
        by_id = [name for name in _BY_ID if getattr(ask, name)]
        [name, *_] = [*by_id, *list(own_engine or ())]
        raise UnsupportedParameter(
            f"The upstream of {model.name} does not support {name}.",
            next_step=f"Remove {name}, or use a model of the built-in engine.",
            param=name,
        )
    if _extra(ask) == _UNSET:
        return
    for name, unset in EXTRA.items():
        if getattr(ask, name) != unset and name not in model.parameters:
            shown = ask.extra.get("named", {}).get(name, name)
            raise UnsupportedParameter(
                f"The upstream of {model.name} does not support {shown}.",
                next_step=f"Remove {shown}; the operator can declare {name} in the upstream's entry.",
                param=shown,
            )


def without_effort(ask: InferenceRequest, model: ServedModel) -> tuple[InferenceRequest, list[str]]:
    """The request, without a `reasoning.effort` of /v1/responses that the model does not know: agents
    send one with every request, and an answer without it is valid. A note says so."""
    if ask.reasoning_effort is None or ask.route != _RESPONSES or _knows_effort(model):
        return ask, []
    note = "reasoning.effort has no effect on this model."
    return replace(ask, reasoning_effort=None), [note]


def _knows_effort(model: ServedModel) -> bool:
    if model.parameters is not None:
        return "reasoning_effort" in model.parameters
    template = model.codec.template if model.codec is not None else None
    return template is not None and template.knows_effort


def _check_own_engine(ask: InferenceRequest, model: ServedModel) -> None:
    if ask.reasoning_effort is not None and not _knows_effort(model):
        shown = ask.extra.get("named", {}).get("reasoning_effort", "reasoning_effort")
        raise UnsupportedParameter(
            f"{shown} is not supported by this model.", next_step=f"Remove {shown}.", param=shown
        )


def check_capabilities(ask: InferenceRequest, model: ServedModel) -> list[str]:
    """Raises UnsupportedParameter for what the engine lacks; returns notes on what it does not
    enforce."""
    notes = []
    for name in ask.engine_parameters:
        if _NEEDS[name] in model.capabilities:
            continue
        if name == "strict":  # several SDKs set it on every tool
            notes.append("tools[].strict is not enforced: the engine cannot constrain the output.")
            continue
        if name in _ROUTES:
            raise NotFound(
                f"{model.name} does not support {_ROUTES[name]}.",
                next_step=f"Use a model of the built-in engine, or one whose upstream entry declares "
                f"{name}.",
                code=f"{name}_not_supported",
                param="model",
            )
        shown = ask.extra.get("named", {}).get(name, name)
        if name in CAPABILITIES:
            raise UnsupportedParameter(
                f"{shown} is not text; {model.name} does not support {name}.",
                next_step="Send parts of type text, or use a model that supports it.",
                param=shown,
            )
        raise UnsupportedParameter(
            f"{model.name} does not support {shown}: its engine cannot constrain the output.",
            next_step=f"Remove {shown}, or ask for it in the prompt and check the answer.",
            param=shown,
        )
    return notes
