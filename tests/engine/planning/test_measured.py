"""Reading and judging measured points. Handed points are used where they are there."""

from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.planning import measured

HANDED = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "planner" / "measured.csv"
HEADER = (
    "silicon_data_source,backend,model_path,system,precision,mode,isl,osl,batch_size,tp_size,pp_size,"
    "attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms\n"
)
ROW = "silicon_concurrency=16,vllm,meta-llama/Llama-3.1-8B,h100_sxm,,agg,1024,256,16,1,1,1,1,1,100,9\n"


def _file(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "points.csv"
    path.write_text(HEADER + "".join(rows))
    return path


def test_a_point_is_read_and_judged(tmp_path: Path) -> None:
    points, left = measured.read(_file(tmp_path, ROW))
    assert (points[0].concurrency, points[0].prompt, points[0].tpot) == (16, 1024, 0.009)
    found = measured.judge(points)
    assert found["dense"]["points"] == 1 and 0 <= found["dense"]["tpot_mape"] < 0.5
    assert found["moe"] == {
        "tpot_mape": None, "ttft_mape": None, "tpot_median": None, "ttft_median": None, "points": 0,
    }  # fmt: skip
    assert not left


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("agg", "disagg", "devices of their own"),
        ("Llama-3.1-8B", "Unheard-Of-9B", "unknown model"),
        ("h100_sxm", "abacus", "unknown device"),
        ("=16", "=100000", "more requests than the cache holds"),
        (",9\n", ",0.5\n", "faster than the weights"),
    ],
)
def test_what_the_formulas_cannot_say_is_left_out(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    points, left = measured.read(_file(tmp_path, ROW.replace(old, new)))
    assert not points
    assert [reason in name for name in left] == [True]


def test_a_series_that_gets_faster_with_load_is_left_out(tmp_path: Path) -> None:
    points, left = measured.read(
        _file(tmp_path, ROW, ROW.replace("=16", "=32").replace(",9\n", ",6.5\n"))
    )
    assert not points and sum(left.values()) == 2


@pytest.mark.parametrize("bad", [",nan\n", ",-1\n", ",x\n", ",\n"])
def test_a_wrong_number_names_line_and_column(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="line 2: silicon_tpot_ms"):
        measured.read(_file(tmp_path, ROW.replace(",9\n", bad)))


def test_a_file_without_the_columns_says_which(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="silicon_ttft_ms"):
        measured.read(path)


def test_ranks_that_share_devices_are_counted_once() -> None:
    row = {"tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"}
    assert measured._layout(row).devices == 8
    row = {"tp_size": "4", "attention_dp_size": "4", "moe_ep_size": "16"}
    assert measured._layout(row).devices == 4


@pytest.mark.skipif(not HANDED.exists(), reason="the measured points are not beside the repository")
def test_the_handed_points_within_the_bars() -> None:
    points, _ = measured.read(HANDED)
    found = measured.judge(points)
    assert found["dense"]["tpot_mape"] < 0.15 and found["moe"]["tpot_mape"] < 0.25
    assert found["dense"]["ttft_mape"] < 0.35 and found["moe"]["ttft_mape"] < 0.35
    assert found["dense"]["points"] > 700 and found["moe"]["points"] > 1600
