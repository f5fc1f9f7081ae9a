"""Every inference surface there is. A route that generates and is not here does not exist."""

from gateway.surface import Surface
from gateway.surfaces.chat import ChatSurface


def inference_surfaces() -> list[Surface]:
    return [ChatSurface()]
