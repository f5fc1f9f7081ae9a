"""The columns of daily sums that are billed, by component."""

from billing.pricing.pricing import Component
from billing.usage.tables import DailyUsage

KEY = (
    DailyUsage.project_id,
    DailyUsage.model,
    DailyUsage.adapter,
    DailyUsage.kind,
    DailyUsage.price_version,
    DailyUsage.usage_period_id,
)
SUMS = (
    (Component.INPUT, DailyUsage.input_tokens - DailyUsage.cached_tokens, DailyUsage.input_amount),
    (Component.CACHED_INPUT, DailyUsage.cached_tokens, DailyUsage.cached_amount),
    (Component.OUTPUT, DailyUsage.output_tokens, DailyUsage.output_amount),
    (Component.WAIVED, DailyUsage.waived_tokens, DailyUsage.waived_amount),
    (Component.REQUEST, DailyUsage.requests, DailyUsage.request_amount),
    (Component.ADAPTER, DailyUsage.adapter_requests, DailyUsage.adapter_amount),
    (Component.GPU_SECOND, DailyUsage.gpu_seconds, DailyUsage.gpu_amount),
    (Component.MODERATION, DailyUsage.moderation_calls, DailyUsage.moderation_amount),
    (Component.AUDIO_SECOND, DailyUsage.audio_seconds, DailyUsage.audio_amount),
    (Component.IMAGE, DailyUsage.images, DailyUsage.image_amount),
    (Component.CHARACTER, DailyUsage.characters, DailyUsage.character_amount),
)
