"""A canary gets its share of the conversations, keeps them, and is replaced when it cannot serve."""

import pytest

from core.clock import FakeClock
from core.errors import SettingError
from gateway.catalog.upstreams import read_upstreams
from gateway.engines.fake import FakeEngine
from gateway.engines.routing.canaries import in_turn, point_of
from gateway.engines.routing.replicas import Replica

SHARES = {"canary": 5, "second": 10}


def replica(name: str) -> Replica:
    engine = FakeEngine(engine_id=name, vocab_size=100, eos_token_ids=(1,))
    return Replica(engine, FakeClock())


EVERY = [replica("stable-1"), replica("canary"), replica("stable-2"), replica("second")]
STABLE = [EVERY[0], EVERY[2]]


def chat(words: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": words}]


def test_each_gets_its_share() -> None:
    got: dict[str, int] = {}
    for number in range(20_000):
        point = point_of("org_1", chat(f"Question {number}"), [])
        names = "+".join(each.name for each in in_turn(EVERY, EVERY, SHARES, point))
        got[names] = got.get(names, 0) + 1
    assert set(got) == {"canary", "second", "stable-1+stable-2"}
    assert abs(got["canary"] / 200 - 5) < 0.7 and abs(got["second"] / 200 - 10) < 1.0


def test_a_conversation_stays_where_it_is() -> None:
    first = point_of("org_1", chat("Hello"), [1, 2])
    later = [*chat("Hello"), {"role": "assistant", "content": "Hi"}, *chat("And then?")[1:]]
    assert point_of("org_1", later, [1, 2, 3]) == first
    assert point_of("org_2", chat("Hello"), [1, 2]) != first
    assert point_of("org_1", None, [1, 2]) != point_of("org_1", None, [1, 3])


def test_who_is_not_ready_is_replaced() -> None:
    for point in (0.0, 4.9):
        assert in_turn(EVERY, EVERY, SHARES, point) == [EVERY[1]]
        without = [each for each in EVERY if each.name != "canary"]
        assert in_turn(without, EVERY, SHARES, point) == without
    assert in_turn(EVERY, EVERY, SHARES, 14.9) == [EVERY[3]]
    assert in_turn(EVERY, EVERY, SHARES, 15.0) == STABLE
    canaries = [EVERY[1], EVERY[3]]
    assert in_turn(canaries, EVERY, SHARES, 50.0) == canaries


@pytest.mark.parametrize("value", ["-1", "101", '"5"', "true", "0.5"])
def test_a_wrong_share_is_named(value: str) -> None:
    with pytest.raises(SettingError, match="canary_percent"):
        read_upstreams(f'[{{"url": "http://a", "canary_percent": {value}}}]')


def test_shares_over_all_are_refused() -> None:
    entry = '{{"url": "http://{0}", "model": "{1}", "canary_percent": 60}}'
    both = f"[{entry.format('a', 'm')}, {entry.format('b', 'm')}]"
    with pytest.raises(SettingError, match="sum to more than 100"):
        read_upstreams(both)
    assert len(read_upstreams(f"[{entry.format('a', 'm')}, {entry.format('b', 'n')}]")) == 2
