from pathlib import Path

import pytest

from engine.errors import AdapterError, RequestError
from tests.engine.helpers import (
    ask,
    make_config,
    make_engine,
    run_alone,
    run_until_idle,
    write_adapter,
)


def prompt_of(length: int, salt: int = 1) -> list[int]:
    return [(salt * 131 + i * 7) % 997 + 1 for i in range(length)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_many_requests_get_what_each_gets_alone(overlapped: bool) -> None:
    engine = make_engine(overlapped=overlapped)
    asks = [ask(f"r{i}", prompt_of(5 + 9 * i, i), max_tokens=3 + i) for i in range(12)]
    for one in asks:
        engine.submit(one, "g")
    found = run_until_idle(engine)
    for one in asks:
        assert found.tokens[one.request_id, 0] == run_alone(one)[0]
        assert found.reasons[one.request_id, 0] == "length"
        receipt = found.receipts[one.request_id]
        assert receipt.prompt == receipt.cached + receipt.computed == len(one.prompt)
        assert receipt.generated == receipt.delivered == one.sampling.max_tokens


def test_a_repeated_prompt_is_found_in_the_cache_but_for_its_last_token() -> None:
    engine = make_engine()
    prompt = prompt_of(16)
    engine.submit(ask("first", prompt), "g")
    found = run_until_idle(engine)
    engine.submit(ask("second", prompt), "g")
    run_until_idle(engine, found)
    assert found.receipts["first"].cached == 0
    assert found.receipts["second"].cached == 12  # 16 is whole blocks, yet one token is computed
    assert found.tokens["first", 0] == found.tokens["second", 0]


def test_tenants_do_not_share_a_cache_but_the_same_tenant_does() -> None:
    engine = make_engine()
    prompt = prompt_of(20)
    engine.submit(ask("a", prompt, namespace="acme"), "g")
    found = run_until_idle(engine)
    engine.submit(ask("b", prompt, namespace="other"), "g")
    engine.submit(ask("c", prompt, namespace="acme"), "g")
    run_until_idle(engine, found)
    assert found.receipts["b"].cached == 0
    assert found.receipts["c"].cached > 0


def test_memory_pressure_preempts_and_the_answers_stay_the_same() -> None:
    engine = make_engine(make_config(num_blocks=16, prefix_cache=False))
    asks = [ask(f"r{i}", prompt_of(8, i), max_tokens=24) for i in range(5)]
    for one in asks:
        engine.submit(one, "g")
    found = run_until_idle(engine)
    assert engine.metrics.counters["preemptions"] > 0
    assert sum(r.recomputed for r in found.receipts.values()) > 0
    for one in asks:
        assert found.tokens[one.request_id, 0] == run_alone(one)[0]


@pytest.mark.parametrize("overlapped", [False, True])
def test_choices_share_the_prompt_and_differ(overlapped: bool) -> None:
    engine = make_engine(overlapped=overlapped)
    for length in (7, 8):
        one = ask(
            f"n{length}", prompt_of(length, length), max_tokens=6, n=3, temperature=1.0, seed=5
        )
        engine.submit(one, "g")
        found = run_until_idle(engine)
        alone = run_alone(one)
        assert {c: found.tokens[one.request_id, c] for c in range(3)} == alone
        assert len({tuple(t) for t in alone.values()}) == 3
        receipt = found.receipts[one.request_id]
        assert (receipt.computed, receipt.recomputed, receipt.generated) == (length, 2, 18)


def test_an_abort_ends_with_a_receipt_that_adds_up() -> None:
    engine = make_engine(make_config(max_batch_tokens=8))
    engine.submit(ask("long", prompt_of(40)), "g")
    engine.step()
    assert engine.abort("long")
    assert not engine.abort("long")
    found = run_until_idle(engine)
    receipt = found.receipts["long"]
    assert (receipt.prompt, receipt.computed, receipt.unprocessed) == (8, 8, 32)
    assert receipt.finish_reason == "abort"
    assert found.reasons["long", 0] == "abort"


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    engine = make_engine(make_config(max_running=1))
    engine.submit(ask("running", prompt_of(4), max_tokens=50, deadline_s=5.0), "g")
    engine.submit(ask("waiting", prompt_of(4), max_tokens=50, deadline_s=5.0), "g")
    engine.step()
    engine._clock.now += 6
    found = run_until_idle(engine)
    assert found.receipts["running"].finish_reason == "deadline"
    assert found.receipts["waiting"].finish_reason == "deadline"
    assert found.receipts["waiting"].unprocessed == 4


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"prompt": []}, "invalid_request", "prompt is empty"),
        ({"prompt": [1, 1000]}, "invalid_request", "prompt id 1000"),
        ({"prompt": [-1]}, "invalid_request", "prompt id -1"),
        ({"prompt": [1] * 5000}, "context_length_exceeded", "5000"),
        ({"prompt": [1] * 300}, "context_length_exceeded", "256"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens is 0"),
        ({"temperature": float("nan")}, "invalid_request", "temperature"),
        ({"top_p": 0.0}, "invalid_request", "top_p"),
        ({"n": 129}, "invalid_request", "n is 129"),
        ({"n": 9, "use_beam_search": True}, "invalid_request", "n is 9"),
        ({"logit_bias": {1000: 1.0}}, "invalid_request", "logit_bias"),
        ({"stop_token_ids": (4000,)}, "invalid_request", "stop_token_ids"),
        ({"weight": 0.0}, "invalid_request", "weight"),
        ({"deadline_s": -1.0}, "deadline_exceeded", "deadline_s"),
        ({"namespace": "\x00public"}, "invalid_request", "namespace"),
    ],
)
def test_bad_requests_are_refused_with_the_field(changes: dict, code: str, words: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=words) as caught:
        engine.submit(ask("bad", changes.pop("prompt", [1, 2]), **changes), "g")
    assert caught.value.code == code
    assert not engine.busy
    assert engine.metrics.refused == {code: 1}


def test_a_full_queue_refuses_with_the_numbers() -> None:
    engine = make_engine(make_config(max_waiting=3, max_waiting_per_tenant=2))
    engine.submit(ask("a", [1]), "g")
    engine.submit(ask("b", [1]), "g")
    with pytest.raises(RequestError, match="2 requests of this tenant wait"):
        engine.submit(ask("c", [1]), "g")
    engine.submit(ask("d", [1], namespace="other"), "g")
    with pytest.raises(RequestError, match="3 requests wait"):
        engine.submit(ask("e", [1], namespace="other"), "g")
    engine.submit(ask("f", [1], namespace="third"), "g")  # which waits for less than its share


def test_the_choices_of_a_request_count_in_the_queue() -> None:
    engine = make_engine(make_config(max_waiting_per_tenant=8))
    engine.submit(ask("a", [1], n=20), "g")
    with pytest.raises(RequestError, match="20 requests of this tenant wait"):
        engine.submit(ask("b", [1]), "g")
    engine.abort("a")
    engine.submit(ask("c", [1], n=5), "g")
    with pytest.raises(RequestError, match="5 requests of this tenant wait"):
        engine.submit(ask("d", [1], n=4), "g")


def test_adapters_change_the_answer_and_more_of_them_than_slots_all_get_served(
    tmp_path: Path,
) -> None:
    engine = make_engine(make_config(max_adapter_slots=2, num_blocks=48))
    paths = dict(write_adapter(tmp_path, f"a{i}", rank=4 * (i + 1))[::-1] for i in range(5))
    for path in paths.values():
        engine.load_adapter(path)
    asks = [
        ask(f"r{i}-{k}", prompt_of(10), max_tokens=5, adapter=digest)
        for k in range(3)
        for i, digest in enumerate(paths)
    ]
    for one in [*asks, ask("base", prompt_of(10), max_tokens=5)]:
        engine.submit(one, "g")
    found = run_until_idle(engine)
    for one in asks:
        assert found.tokens[one.request_id, 0] == run_alone(one, paths[one.adapter])[0]
    assert len({tuple(found.tokens[f"r{i}-0", 0]) for i in range(5)}) == 5


def test_an_unloaded_adapter_finishes_what_began_and_is_then_unknown(tmp_path: Path) -> None:
    engine = make_engine()
    path, digest = write_adapter(tmp_path, "one")
    engine.load_adapter(path)
    one = ask("r", prompt_of(6), max_tokens=8, adapter=digest)
    engine.submit(one, "g")
    engine.step()
    engine.unload_adapter(digest)
    with pytest.raises(AdapterError, match="not loaded"):
        engine.submit(ask("late", [1], adapter=digest), "g")
    found = run_until_idle(engine)
    assert found.tokens["r", 0] == run_alone(one, path)[0]
    assert digest not in engine.adapters.known
    engine.check_integrity()


def test_a_failed_step_ends_its_requests_and_the_engine_serves_on() -> None:
    engine = make_engine()
    engine.submit(ask("doomed", prompt_of(5)), "g")
    launch = engine._runner.launch

    def broken(batch: object) -> object:
        raise RuntimeError("device on fire")

    engine._runner.launch = broken
    engine.step()
    engine._runner.launch = launch
    engine.submit(ask("next", prompt_of(5)), "g")
    found = run_until_idle(engine)
    assert found.receipts["doomed"].finish_reason == "error"
    assert "device on fire" in found.receipts["doomed"].message
    assert found.receipts["next"].finish_reason == "length"
