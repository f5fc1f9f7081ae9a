"""Column types and column groups shared by billing tables."""

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from core import lengths
from core.database import Units

ID = String(lengths.ID)
NAME = String(lengths.NAME)
CURRENCY = String(3)
# Byte order, so that time-ordered ids fall into monthly partitions.
ORDERED_ID = String(lengths.ID).with_variant(String(lengths.ID, collation="C"), "postgresql")


class Quantities:
    """Whole counts. `input_tokens` includes `cached_tokens`; generated tokens = output + waived. The
    last ones divide uncached input and output, whatever prices them (`billing.pricing.components`)."""

    requests: Mapped[int] = mapped_column(BigInteger)
    input_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    waived_tokens: Mapped[int] = mapped_column(BigInteger)
    adapter_requests: Mapped[int] = mapped_column(BigInteger)
    gpu_seconds: Mapped[int] = mapped_column(BigInteger)
    moderation_calls: Mapped[int] = mapped_column(BigInteger)
    audio_seconds: Mapped[int] = mapped_column(BigInteger, server_default="0")
    images: Mapped[int] = mapped_column(BigInteger, server_default="0")
    characters: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cache_write_5m_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cache_write_1h_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    audio_input_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    image_input_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    audio_output_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    image_output_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    searches: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tool_calls: Mapped[int] = mapped_column(BigInteger, server_default="0")


class Amounts:
    """Picounits by price component; `amount` is their sum."""

    input_amount: Mapped[int] = mapped_column(Units)  # uncached input
    cached_amount: Mapped[int] = mapped_column(Units)
    output_amount: Mapped[int] = mapped_column(Units)
    waived_amount: Mapped[int] = mapped_column(Units)
    request_amount: Mapped[int] = mapped_column(Units)
    adapter_amount: Mapped[int] = mapped_column(Units)
    gpu_amount: Mapped[int] = mapped_column(Units)
    moderation_amount: Mapped[int] = mapped_column(Units)
    audio_amount: Mapped[int] = mapped_column(Units, server_default="0")
    image_amount: Mapped[int] = mapped_column(Units, server_default="0")
    character_amount: Mapped[int] = mapped_column(Units, server_default="0")
    cache_write_5m_amount: Mapped[int] = mapped_column(Units, server_default="0")
    cache_write_1h_amount: Mapped[int] = mapped_column(Units, server_default="0")
    audio_input_amount: Mapped[int] = mapped_column(Units, server_default="0")
    image_input_amount: Mapped[int] = mapped_column(Units, server_default="0")
    reasoning_amount: Mapped[int] = mapped_column(Units, server_default="0")
    audio_output_amount: Mapped[int] = mapped_column(Units, server_default="0")
    image_output_amount: Mapped[int] = mapped_column(Units, server_default="0")
    search_amount: Mapped[int] = mapped_column(Units, server_default="0")
    tool_call_amount: Mapped[int] = mapped_column(Units, server_default="0")
    amount: Mapped[int] = mapped_column(Units)


# Of usage that a provider divides; all zero in most rows.
PART_QUANTITIES = (
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "audio_input_tokens",
    "image_input_tokens",
    "reasoning_tokens",
    "audio_output_tokens",
    "image_output_tokens",
    "searches",
    "tool_calls",
)
PART_AMOUNTS = (
    "cache_write_5m_amount",
    "cache_write_1h_amount",
    "audio_input_amount",
    "image_input_amount",
    "reasoning_amount",
    "audio_output_amount",
    "image_output_amount",
    "search_amount",
    "tool_call_amount",
)
PLAIN_QUANTITIES = (
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "waived_tokens",
    "adapter_requests",
    "gpu_seconds",
    "moderation_calls",
)
UNIT_QUANTITIES = ("audio_seconds", "images", "characters")
PLAIN_AMOUNTS = (
    "input_amount",
    "cached_amount",
    "output_amount",
    "waived_amount",
    "request_amount",
    "adapter_amount",
    "gpu_amount",
    "moderation_amount",
)
UNIT_AMOUNTS = ("audio_amount", "image_amount", "character_amount")
QUANTITY_COLUMNS = (*PLAIN_QUANTITIES, *UNIT_QUANTITIES, *PART_QUANTITIES)
AMOUNT_COLUMNS = (
    *PLAIN_AMOUNTS,
    *UNIT_AMOUNTS,
    *PART_AMOUNTS,
    "amount",
)  # in the order of components
# The sums of usage in tokens, GPU seconds and calls, whose other columns keep their default of zero.
PLAIN_SUMS = (*PLAIN_QUANTITIES, *PLAIN_AMOUNTS, "amount")
