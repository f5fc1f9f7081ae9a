from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.worker.options import parse


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
        ({"heartbeat_s": 5.0, "gateway_stall_s": 5.0}, "gateway_stall_s"),
        ({"cache_floor_blocks": 9, "cache_cap_blocks": 3}, "cache_cap_blocks"),
        ({"output_price": float("nan")}, "output_price"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**{"model": "demo", **change})


def test_the_defaults_stand() -> None:
    assert EngineConfig(model="demo").block_size == 16


def test_the_command_line_has_every_setting_by_its_name(tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes.json"
    prefixes.write_text("[[1, 2, 3], [4]]")
    options = parse(
        [
            *("--model", "m", "--num-blocks", "7", "--no-prefix-cache", "--adapter-drain-s", "0.5"),
            *("--receipts", "r", "--public-prefixes", str(prefixes), "--fairness", "fcfs"),
        ]
    )
    expected = EngineConfig(
        model="m",
        num_blocks=7,
        prefix_cache=False,
        adapter_drain_s=0.5,
        receipts_file="r",
        public_prefixes=((1, 2, 3), (4,)),
        fairness="fcfs",
        max_batch_tokens=options.config.max_batch_tokens,
    )
    assert options.config == expected
    prefixes.write_text("[1]")
    with pytest.raises(ConfigError, match="public-prefixes"):
        parse(["--model", "m", "--public-prefixes", str(prefixes)])
