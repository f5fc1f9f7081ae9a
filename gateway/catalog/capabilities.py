"""Parameters that only some engines support. Where one is not supported, the request is refused."""

from operator import attrgetter

from core.errors import NotFound, UnsupportedParameter
from gateway.catalog.catalog import ServedModel
from gateway.inference.request import InferenceRequest
from gateway.upstreams.openai_body import EXTRA

# The capability that an upstream must declare for each parameter in `InferenceRequest.engine_parameters`.
_NEEDS = {
    "tool_choice": "tools",
    "strict": "tools",
    "response_format": "json",
    "structured_outputs": "grammar",
    "embeddings": "embeddings",
}

_extra = attrgetter(*EXTRA)
_UNSET = tuple(EXTRA.values())


def check_sampling_parameters(ask: InferenceRequest, model: ServedModel) -> None:
    """Raise UnsupportedParameter for a sampling parameter that the model's upstream lacks."""
    if model.parameters is None or _extra(ask) == _UNSET:
        return
    for name, unset in EXTRA.items():
        if getattr(ask, name) != unset and name not in model.parameters:
            shown = ask.extra.get("named", {}).get(name, name)
            raise UnsupportedParameter(
                f"The upstream of {model.name} does not support {shown}.",
                next_step=f"Remove {shown}; the operator can declare {name} in the upstream's entry.",
                param=shown,
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
        if name == "embeddings":
            raise NotFound(
                f"{model.name} does not support embeddings.",
                next_step="Use a model whose upstream entry declares embeddings.",
                code="embeddings_not_supported",
                param="model",
            )
        shown = ask.extra.get("named", {}).get(name, name)
        raise UnsupportedParameter(
            f"{model.name} does not support {shown}: its engine cannot constrain the output.",
            next_step=f"Remove {shown}, or ask for it in the prompt and check the answer.",
            param=shown,
        )
    return notes
