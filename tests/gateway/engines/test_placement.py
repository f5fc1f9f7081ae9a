"""Placement: the cached prefix, the resident adapter and the short queue each pull, and can be outbid."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.clock import FakeClock
from engine.protocol import AdapterState, EngineStats, KvEvent
from gateway.engines.routing.breaker import Breaker, State
from gateway.engines.routing.placement import PlacementRequest, ReplicaSnapshot, choose, estimate
from gateway.engines.routing.prefix_index import PrefixIndex

IDLE = EngineStats(running=0, waiting=0, blocks_free=1000, blocks_total=1000, tokens_waiting=0)


def first(
    replicas: list[ReplicaSnapshot], ask: PlacementRequest, overlap: dict[str, int] | None = None
) -> str:
    return choose(replicas, ask, overlap or {})[0][0].engine_id


def test_the_replica_with_the_prefix_wins_until_its_queue_is_too_long() -> None:
    cold, warm = ReplicaSnapshot("cold", IDLE), ReplicaSnapshot("warm", IDLE)
    ask = PlacementRequest(prompt_tokens=1600)
    assert first([cold, warm], ask, {"warm": 99}) == "warm"
    busy = replace(warm, stats=replace(IDLE, tokens_waiting=5000))
    assert first([cold, busy], ask, {"warm": 99}) == "cold"


def with_adapter(name: str, state: str) -> ReplicaSnapshot:
    return ReplicaSnapshot(name, IDLE, adapters={"d1": AdapterState("d1", state, 8, 3)})


def test_an_adapter_pulls_by_how_near_to_the_device_it_is() -> None:
    ask = PlacementRequest(10, adapter="d1")
    states = ["resident", "loading", "host", "draining", "absent"]
    replicas = [with_adapter(state, state) for state in states]
    assert [replica.engine_id for replica, _ in choose(replicas, ask, {})] == states
    assert estimate(replicas[0], ask, 0).adapter_s == 0
    unknown = estimate(ReplicaSnapshot("z", IDLE), ask, 0).adapter_s
    assert unknown == estimate(with_adapter("y", "absent"), ask, 0).adapter_s > 0


def test_a_full_cache_counts_as_time() -> None:
    full = ReplicaSnapshot("full", replace(IDLE, blocks_free=1))
    assert (
        first([full, ReplicaSnapshot("roomy", IDLE)], PlacementRequest(prompt_tokens=320))
        == "roomy"
    )


def test_what_is_not_available_is_never_chosen() -> None:
    assert choose([ReplicaSnapshot("a", IDLE, available=False)], PlacementRequest(1), {}) == []


def test_a_conversation_stays_where_it_was_when_nothing_speaks_against_it() -> None:
    replicas = [ReplicaSnapshot("a", IDLE), ReplicaSnapshot("b", IDLE, sticky=True)]
    assert first(replicas, PlacementRequest(100)) == "b"


def test_what_was_just_sent_counts_before_the_next_heartbeat() -> None:
    replicas = [
        ReplicaSnapshot("a", IDLE, queue_correction_tokens=4000),
        ReplicaSnapshot("b", IDLE),
    ]
    assert first(replicas, PlacementRequest(100)) == "b"


BLOCKS = ["0a", "0b", "0c", "0d", "0e", "0f"]
events = st.lists(
    st.tuples(
        st.sampled_from(["r1", "r2", "r3"]),
        st.sampled_from(["stored", "removed", "forget"]),
        st.lists(st.sampled_from(BLOCKS), max_size=4),
    )
)


@given(events, st.lists(st.sampled_from(BLOCKS), max_size=6))
def test_the_index_mirrors_the_caches(
    history: list[tuple[str, str, list[str]]], chain: list[str]
) -> None:
    index, truth = PrefixIndex(), {name: set[str]() for name in ("r1", "r2", "r3")}
    for replica, kind, keys in history:
        if kind == "forget":
            index.forget(replica)
            truth[replica].clear()
            continue
        index.apply(replica, [KvEvent(kind, keys)])
        truth[replica] = (
            truth[replica] | set(keys) if kind == "stored" else truth[replica] - set(keys)
        )
    for replica, held in truth.items():
        depth = 0
        while depth < len(chain) and chain[depth] in held:
            depth += 1
        found = index.overlap(bytes.fromhex(key) for key in chain)
        assert found.get(replica, 0) == depth
        assert index.blocks(replica) == len(held)


def test_a_breaker_opens_probes_once_and_closes() -> None:
    clock = FakeClock()
    breaker = Breaker(clock, failures=3, window_s=10, pause_s=2)
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.state is State.OPEN
    assert not breaker.allows()
    assert breaker.retry_after_s() == 2
    clock.advance(2)
    assert breaker.allows()
    breaker.sent()
    assert not breaker.allows(), "one probe at a time"
    breaker.failed()
    clock.advance(2)
    assert not breaker.allows(), "the pause has doubled"
    clock.advance(2)
    breaker.sent()
    breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_old_failures_do_not_open_it() -> None:
    clock = FakeClock()
    breaker = Breaker(clock, failures=3, window_s=10)
    for _ in range(6):
        breaker.failed()
        clock.advance(6)
    assert breaker.allows()


def test_a_copy_in_a_tier_is_dearer_than_a_hit_and_cheaper_than_a_miss() -> None:
    names = ["cold", "disk", "warm"]
    replicas = [ReplicaSnapshot(name, IDLE) for name in names]
    ask = PlacementRequest(prompt_tokens=1600)
    ranked = choose(replicas, ask, {"warm": 90}, {"disk": 90, "warm": 95})
    assert [replica.engine_id for replica, _ in ranked] == ["warm", "disk", "cold"]
    cost = {cost.engine_id: cost.total_s for _, cost in ranked}
    assert cost["warm"] < 0.5 * cost["disk"] < 0.5 * cost["cold"]


def test_the_index_keeps_tiers_apart() -> None:
    index, keys = PrefixIndex(), [bytes([n]) * 32 for n in range(4)]
    names = [key.hex() for key in keys]
    index.apply("a", [KvEvent("stored", names[:1]), KvEvent("stored", names[:3], tier="disk")])
    index.apply(
        "b", [KvEvent("stored", names[:2], tier="ram"), KvEvent("stored", names, tier="disk")]
    )
    index.apply("b", [KvEvent("removed", names[3:], tier="disk")])
    assert index.overlap(keys) == {"a": 1}
    assert index.overlap_below(keys) == {"a": 3, "b": 3}
    assert index.knows("b") and not index.knows("c")
    index.apply("b", [KvEvent("cleared", [])])
    assert index.overlap_below(keys) == {"a": 3} and not index.knows("b")
