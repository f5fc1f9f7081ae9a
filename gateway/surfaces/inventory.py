"""Every inference surface there is. A route that generates and is not here does not exist."""

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
    """Those that a batch may name, as at OpenAI."""
    return [ChatSurface(), CompletionsSurface(), EmbeddingsSurface(), ResponsesSurface()]
