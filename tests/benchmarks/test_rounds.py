"""Contenders in turn: what each says is told, one that dies costs nobody else its figure."""

import os
import sys
from pathlib import Path

from benchmarks.cpu.rounds import contender, rounds

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
SCRIPT = """
import sys
sys.path.insert(0, {peers!r})
from protocol import answer
print("noise of a library")
answer({{"base": lambda: 2.5, "dies": lambda: sys.exit("of it"), "one": lambda: 1.0}})
"""


def command(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_each_is_asked_for_what_it_can_and_its_death_is_its_own(tmp_path: Path) -> None:
    script = command(SCRIPT.format(peers=str(PEERS)))
    with (
        contender("a", script, dict(os.environ), tmp_path) as first,
        contender("b", script, dict(os.environ), tmp_path) as second,
        contender("c", command("raise SystemExit(3)"), dict(os.environ), tmp_path) as third,
    ):
        assert third is None
        assert first is not None and second is not None
        assert first.scenarios == ["base", "dies", "one"]
        rounds([(first, "base"), (second, "dies"), (first, "one"), (second, "base")], 3)
        assert first.rates == {"base": [2.5] * 3, "one": [1.0] * 3}
        # In the second round, which runs backwards, it was dead already.
        assert second.rates == {"dies": [None] * 3, "base": [None] * 3}
        pids = [each.process.pid for each in (first, second)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
