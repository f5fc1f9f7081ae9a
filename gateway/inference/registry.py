"""The list of API surfaces. Every inference route is registered from it."""

from gateway.inference.chat.response import ChatSurface
from gateway.inference.completions.response import CompletionsSurface
from gateway.inference.embeddings.response import EmbeddingsSurface
from gateway.inference.messages.response import MessagesSurface
from gateway.inference.responses.response import ResponsesSurface
from gateway.inference.scores.response import RerankSurface, ScoreSurface
from gateway.inference.surface import Surface


def inference_surfaces() -> list[Surface]:
    return [
        ChatSurface(),
        CompletionsSurface(),
        MessagesSurface(),
        ResponsesSurface(),
        EmbeddingsSurface(),
        RerankSurface(),
        ScoreSurface(),
    ]


def runner_surfaces() -> list[Surface]:
    """The surfaces of all batches: OpenAI's, and Anthropic's own kind."""
    return [*batch_surfaces(), MessagesSurface()]


def batch_surfaces() -> list[Surface]:
    """The surfaces that batches support, as in OpenAI's API."""
    return [ChatSurface(), CompletionsSurface(), EmbeddingsSurface(), ResponsesSurface()]
