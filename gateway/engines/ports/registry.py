"""The port of each provider."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.anthropic.port import AnthropicPort
from gateway.engines.ports.bedrock.port import BedrockPort
from gateway.engines.ports.cohere.port import CoherePort
from gateway.engines.ports.gemini.port import GeminiPort, VertexAnthropicPort, VertexPort
from gateway.engines.ports.port import Port
from gateway.engines.ports.responses.port import ResponsesPort
from gateway.engines.ports.shaped.dialects import DIALECTS
from gateway.engines.ports.shaped.port import ShapedPort

PORTS: Mapping[str, Callable[[Upstream], Port]] = MappingProxyType(
    {
        "anthropic": AnthropicPort,
        "gemini": GeminiPort,
        "vertex": VertexPort,
        "vertex-anthropic": VertexAnthropicPort,
        "bedrock": BedrockPort,
        "cohere": CoherePort,
        "openai-responses": ResponsesPort,
        **dict.fromkeys(DIALECTS, ShapedPort),
    }
)


def port_of(upstream: Upstream) -> Port:
    return PORTS[upstream.provider](upstream)
