import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": ""}, "model"),
        ({"dtype": "int3"}, "dtype"),
        ({"fairness": "luck"}, "fairness"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"max_running": 10, "max_batch_tokens": 4}, "max_running"),
        ({"heartbeat_s": 5.0, "gateway_timeout_s": 5.0}, "gateway_timeout_s"),
        ({"cache_floor_blocks": 9, "cache_cap_blocks": 3}, "cache_cap_blocks"),
        ({"output_price": float("nan")}, "output_price"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**{"model": "demo", **change})


def test_the_defaults_stand() -> None:
    assert EngineConfig(model="demo").block_size == 16
