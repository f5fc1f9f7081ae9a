"""The list of API surfaces. Every inference route is registered from it."""

from gateway.answers.surface import Surface
from gateway.formats.chat.response import ChatSurface
from gateway.formats.completions.response import CompletionsSurface
from gateway.formats.embeddings import EmbeddingsSurface
from gateway.formats.messages.response import MessagesSurface
from gateway.formats.responses.response import ResponsesSurface
from gateway.formats.scores import RerankSurface, ScoreSurface


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
