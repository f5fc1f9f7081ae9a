"""The list of API surfaces. Every inference route is registered from it."""

from gateway.surface import Surface
from gateway.surfaces.chat import ChatSurface
from gateway.surfaces.completions import CompletionsSurface
from gateway.surfaces.embeddings import EmbeddingsSurface
from gateway.surfaces.messages import MessagesSurface
from gateway.surfaces.responses import ResponsesSurface


def inference_surfaces() -> list[Surface]:
    return [
        ChatSurface(),
        CompletionsSurface(),
        MessagesSurface(),
        ResponsesSurface(),
        EmbeddingsSurface(),
    ]


def batch_surfaces() -> list[Surface]:
    """The surfaces that batches support, as in OpenAI's API."""
    return [ChatSurface(), CompletionsSurface(), EmbeddingsSurface(), ResponsesSurface()]
