"""Estimates of output length, which a reservation uses before the real length is known."""

from collections import OrderedDict

_SMOOTHING = 0.2  # weight of the newest response in the moving mean
_MAX_ENTRIES = 10_000  # pairs of tenant and model


class OutputEstimates:
    """Moving mean and mean deviation per tenant and model; the estimate is mean + 2 deviations."""

    def __init__(self) -> None:
        self._estimates: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def expect(self, tenant_id: str, model: str, default: int) -> int:
        known = self._estimates.get((tenant_id, model))
        if known is None:
            return default
        mean, deviation = known
        return round(mean + 2 * deviation) or 1

    def learn(self, tenant_id: str, model: str, output_tokens: int, default: int) -> None:
        key = (tenant_id, model)
        mean, deviation = self._estimates.pop(key, (float(default), default / 4))
        error = output_tokens - mean
        deviation += _SMOOTHING * (abs(error) - deviation)
        self._estimates[key] = (mean + _SMOOTHING * error, deviation)
        if len(self._estimates) > _MAX_ENTRIES:
            self._estimates.popitem(last=False)
