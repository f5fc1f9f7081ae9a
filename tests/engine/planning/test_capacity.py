"""Times, memory and plans against cases worked out by hand."""

from itertools import pairwise

import pytest

from engine.errors import ConfigError
from engine.planning.capacity import replica
from engine.planning.devices import Device, device
from engine.planning.known_models import known_shape
from engine.planning.memory import Adapters, memory_of
from engine.planning.model_shape import ModelShape, shape_of
from engine.planning.plan import Question, answers
from engine.planning.precision import kv_bytes, precision
from engine.planning.step_times import Layout, Serving
from engine.planning.workload import Workload, tokens_a_step
from tests.engine.planning.test_model_shape import LLAMA


def _known(name: str) -> ModelShape:
    shape = known_shape(name)
    assert shape is not None
    return shape


def _serving(name: str, gpu: str = "h100", held: str = "bf16", tensor: int = 1) -> Serving:
    return Serving(_known(name), precision(held), 2.0, device(gpu), Layout(tensor))


def test_five_guesses_at_acceptance_0_7_give_2_94_tokens_a_step() -> None:
    # 1 + 0.7 + 0.49 + 0.343 + 0.2401 + 0.16807
    assert tokens_a_step(0.7, 5) == pytest.approx(2.94117)
    assert tokens_a_step(0.0, 5) == 1
    assert tokens_a_step(0.7, 0) == pytest.approx(1)


def test_terms_of_a_decode_step_by_hand() -> None:
    chip = Device("test", 1e9, 1000.0, (("bf16", 100.0),), 10.0, 8, "hand")
    serving = Serving(shape_of(LLAMA), precision("bf16"), 2.0, chip, Layout(2))
    terms = serving.decode_terms(3, 5)
    assert terms["weights"] == pytest.approx(2 * (384 + 768 + 80) / 2 / 1000)
    assert terms["cache"] == pytest.approx(3 * 5 * 16 * 2 / 2 / 1000)
    assert terms["products"] == pytest.approx(2 * 1232 * 3 / 2 / 100)
    # two all-reduces in each of 2 layers, 3 rows of 8 values of 2 bytes, 2·(2 − 1)/2 of them sent
    assert terms["link"] == pytest.approx(2 * 2 * 3 * 8 * 2 * 1 / 10)


def test_heads_that_do_not_divide_further_are_held_by_each_rank() -> None:
    eight, sixteen = (
        memory_of(_serving("llama-3.1-405b", "gb200", "fp8", t), 100)
        for t in (8, 16)
    )  # fmt: skip
    assert sixteen.kv_per_token == 2 * eight.kv_per_token


def test_what_fits_by_hand() -> None:
    memory = memory_of(_serving("llama-3.1-8b"), 1300)
    assert memory.usable == 0.9 * 80e9
    assert memory.weights == 2 * 8_029_995_008 or memory.weights == pytest.approx(16.06e9, rel=1e-3)
    assert memory.kv_per_request == 131072 * 1300
    assert memory.sequences == pytest.approx((72e9 - memory.weights - 2e9) / (131072 * 1300))


def test_a_shared_prefix_is_held_once() -> None:
    plain = memory_of(_serving("llama-3.1-8b"), 1300)
    shared = memory_of(_serving("llama-3.1-8b"), 1300, shared=900)
    assert shared.kv_shared == 131072 * 900
    assert shared.kv_per_request == plain.kv_per_request - 131072 * 900


def test_an_adapter_of_rank_16_of_llama_3_1_8b() -> None:
    # All seven projections: 32 layers · 16 · (q 8192, k and v 5120 each, o 8192, three of 4096 + 14336),
    # as many as peft says that are trained.
    values = Adapters(1, 16).values(_known("llama-3.1-8b"))
    assert values == 32 * 16 * (8192 + 5120 + 5120 + 8192 + 3 * (4096 + 14336)) == 41_943_040


def test_the_first_knee_holds_and_a_little_more_does_not() -> None:
    work = Workload(rate=1, prompt=1000, output=300, ttft=0.3, tpot=0.04)
    one = replica(_serving("llama-3.1-8b"), work)
    knee = one.capacity()
    assert not one.state(knee.rate).limit
    assert one.state(1.001 * knee.rate).limit


def test_littles_law_holds_in_every_state() -> None:
    work = Workload(rate=1, prompt=1000, output=300)
    one = replica(_serving("llama-3.1-8b"), work)
    for rate in (1.0, 5.0, 15.0):
        state = one.state(rate)
        assert state.sequences == pytest.approx(max(1, rate * 300 * state.tpot), rel=1e-3)
        assert sum(state.shares.values()) == pytest.approx(1)


def test_more_load_is_never_faster() -> None:
    work = Workload(rate=1, prompt=1000, output=300)
    states = replica(_serving("llama-3.1-8b"), work).curve(20.0)
    assert all(a.tpot <= b.tpot and a.ttft <= b.ttft for a, b in pairwise(states))


def _question(**given: object) -> Question:
    work = given.pop("workload", Workload(rate=20, prompt=1000, output=300, ttft=0.3, tpot=0.04))
    name = str(given.pop("model", "llama-3.1-70b"))
    return Question(
        shape=_known(name), workload=work, devices=[device("h100"), device("b200")],
        precision=precision("fp8"), kv_bytes=kv_bytes("fp8"), **given,
    )  # type: ignore[arg-type]  # fmt: skip


def test_the_chosen_plan_is_the_cheapest_that_holds() -> None:
    found = answers(_question())
    best = found[0]
    assert best.holds and best.usd_per_hour is not None
    assert all(
        each.usd_per_hour >= best.usd_per_hour for each in found if each.holds and each.usd_per_hour
    )
    assert best.state.tpot <= 0.04 and best.state.ttft <= 0.3
    served = 20 * 3600 * 300 / 1e6
    assert best.usd_per_million(300) == pytest.approx(best.usd_per_hour / served)


def test_a_model_that_does_not_fit_says_so() -> None:
    best = answers(_question(tensor=1, count=1, model="llama-3.1-405b"))[0]
    assert not best.holds
    assert best.knee.limit == "memory"


def test_an_objective_that_no_load_meets_is_named() -> None:
    work = Workload(rate=1, prompt=1000, output=300, tpot=1e-5)
    best = answers(_question(workload=work))[0]
    assert not best.holds
    assert best.knee.limit == "tpot"


def test_a_device_without_a_price_comes_after_those_with_one() -> None:
    question = _question()
    priced = answers(question)[0]
    assert priced.replica.serving.device.price is not None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rate": 0}, "rate"), ({"rate": -1}, "rate"), ({"prompt": 0}, "prompt"),
        ({"output": float("nan")}, "output"), ({"shared": 1000}, "shared-prefix"),
        ({"acceptance": 1.0}, "acceptance"), ({"guesses": -1}, "guesses"),
    ],
)  # fmt: skip
def test_a_workload_that_cannot_be_is_refused_by_name(given: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Workload(**{"rate": 1, "prompt": 1000, "output": 10, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "named"), [(Layout(3), "tp"), (Layout(expert=2), "ep"), (Layout(pipeline=99), "pp")]
)
def test_a_layout_that_cannot_be_is_refused_by_name(layout: Layout, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} is"):
        layout.check(_known("llama-3.1-70b"))


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="h100"):
        device("abacus")
