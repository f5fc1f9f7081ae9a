"""What only some engines can do: asked of one that cannot, it is refused by name, never ignored."""

from operator import attrgetter

from core.errors import NotFound, UnsupportedParameter
from gateway.ask import Ask
from gateway.catalog.catalog import ServedModel
from gateway.engines.openai_body import EXTRA

# Of each parameter in `Ask.beyond`: the capability that an upstream must declare.
_NEEDS = {
    "tool_choice": "tools",
    "strict": "tools",
    "response_format": "json",
    "embeddings": "embeddings",
}

_extra = attrgetter(*EXTRA)
_NOTHING = tuple(EXTRA.values())


def refuse_lacking(ask: Ask, model: ServedModel) -> None:
    """Of sampling parameters that an upstream does not take."""
    if model.parameters is None or _extra(ask) == _NOTHING:
        return
    for name, nothing in EXTRA.items():
        if getattr(ask, name) != nothing and name not in model.parameters:
            raise UnsupportedParameter(
                f"{model.name} does not take {name}: its upstream lacks it.",
                next_step=f"Leave {name} out; the operator can declare it in the upstream's entry.",
                param=name,
            )


def refuse_beyond(ask: Ask, model: ServedModel) -> None:
    for name in ask.beyond:
        if _NEEDS[name] in model.capabilities:
            continue
        if name == "embeddings":
            raise NotFound(
                f"{model.name} makes no embeddings.",
                next_step="Name a model of an upstream that does: its entry declares embeddings.",
                code="embeddings_not_supported",
                param="model",
            )
        shown = ask.extra.get("named", {}).get(name, name)
        raise UnsupportedParameter(
            f"{model.name} cannot be made to obey {shown}: its engine writes freely.",
            next_step=f"Leave {shown} out, or ask for it in words and check the answer.",
            param=shown,
        )
