"""What the meters of usage are called, and the units and blocks in which FOCUS shows and prices them."""

from dataclasses import dataclass

from billing.pricing.pricing import PER_MILLION, Component

BLOCK = 1_000_000  # tokens and characters are priced by the million


@dataclass(frozen=True, slots=True)
class Meter:
    name: str
    unit: str
    details: tuple[
        tuple[str, str | bool], ...
    ] = ()  # of SkuPriceDetails, by the names of FOCUS 1.5
    own_details: tuple[tuple[str, str | bool], ...] = ()  # that FOCUS has no name for

    def block(self, component: Component) -> int:
        return BLOCK if component in PER_MILLION else 1


METERS = {
    Component.INPUT: Meter("Input Tokens", "Tokens", (("TokenDirection", "Input"),)),
    Component.CACHED_INPUT: Meter(
        "Cached Input Tokens",
        "Tokens",
        (("TokenDirection", "Input"), ("TokenCacheAction", "Read")),
    ),
    Component.OUTPUT: Meter("Output Tokens", "Tokens", (("TokenDirection", "Output"),)),
    Component.WAIVED: Meter(
        "Waived Output Tokens", "Tokens", (("TokenDirection", "Output"),), (("Delivered", False),)
    ),
    Component.REQUEST: Meter("Requests", "Requests"),
    Component.ADAPTER: Meter("Requests with an Adapter", "Requests"),
    Component.GPU_SECOND: Meter("Dedicated GPU Seconds", "Seconds"),
    Component.MODERATION: Meter("Moderation Calls", "Calls"),
    Component.AUDIO_SECOND: Meter("Audio Seconds", "Seconds"),
    Component.IMAGE: Meter("Images", "Images"),
    Component.CHARACTER: Meter("Spoken Characters", "Characters"),
    Component.CACHE_WRITE_5M: Meter(
        "Cache Write Tokens",
        "Tokens",
        (("TokenDirection", "Input"), ("TokenCacheAction", "Write")),
        (("CacheLifetime", "5m"),),
    ),
    Component.CACHE_WRITE_1H: Meter(
        "Cache Write Tokens, One Hour",
        "Tokens",
        (("TokenDirection", "Input"), ("TokenCacheAction", "Write")),
        (("CacheLifetime", "1h"),),
    ),
    Component.AUDIO_INPUT: Meter(
        "Audio Input Tokens", "Tokens", (("TokenDirection", "Input"),), (("Modality", "Audio"),)
    ),
    Component.IMAGE_INPUT: Meter(
        "Image Input Tokens", "Tokens", (("TokenDirection", "Input"),), (("Modality", "Image"),)
    ),
    Component.REASONING: Meter(
        "Reasoning Tokens", "Tokens", (("TokenDirection", "Output"),), (("Reasoning", True),)
    ),
    Component.AUDIO_OUTPUT: Meter(
        "Audio Output Tokens", "Tokens", (("TokenDirection", "Output"),), (("Modality", "Audio"),)
    ),
    Component.IMAGE_OUTPUT: Meter(
        "Image Output Tokens", "Tokens", (("TokenDirection", "Output"),), (("Modality", "Image"),)
    ),
    Component.SEARCH: Meter("Web Searches", "Searches"),
    Component.TOOL_CALL: Meter("Tool Calls", "Calls"),
}
