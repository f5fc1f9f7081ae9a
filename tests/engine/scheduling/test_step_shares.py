"""The time of steps is divided among requests by their work, and nothing of it is lost.

The fake runner's step reads one byte per position and computes 1,000 operations per token, which count
as 10 bytes: a row of n tokens after s positions is 10 n + (s + n) of work.
"""

import dataclasses

import pytest

from engine.batch import ModelWork, Row, StepBatch, model_work
from engine.model_spec import ExpertsSpec
from engine.models.config_values import base_spec
from engine.protocol import SamplingParams
from tests.engine.helpers import Clock, ask, make_config, make_engine, run_until_idle

SHAPE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


def row(tokens: int, start: int) -> Row:
    sampling = SamplingParams(max_tokens=1)
    return Row(1, [7] * tokens, start, [], None, True, sampling, 0, [], 0)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_long_context_takes_more_of_the_time_than_its_tokens_show(overlapped: bool) -> None:
    clock = Clock()

    def _one_second(_: StepBatch) -> None:
        clock.now += 1.0

    config = make_config(num_blocks=256, max_batch_tokens=512, step_s=0.0)
    engine = make_engine(config, clock, pause=_one_second, overlapped=overlapped)
    engine.submit(ask("long", [9] * 200, 3), "gateway")
    engine.submit(ask("short", [5] * 4, 3, namespace="other"), "gateway")
    receipts = run_until_idle(engine).receipts
    # Prompts 2200 : 44; then each samples two more tokens, 211 : 15 and 212 : 16.
    short_s = 44 / 2244 + 15 / 226 + 16 / 228
    if not overlapped:
        assert receipts["short"].busy_us == round(short_s * 1e6) == 156155
    assert receipts["long"].busy_us + receipts["short"].busy_us == pytest.approx(3e6, abs=1)
    assert receipts["long"].generated == receipts["short"].generated == 3
    assert receipts["long"].busy_us > 15 * receipts["short"].busy_us


def test_a_cached_prompt_still_takes_time_by_its_length() -> None:
    clock = Clock()

    def _one_second(_: StepBatch) -> None:
        clock.now += 1.0

    config = make_config(num_blocks=256, max_batch_tokens=512, step_s=0.0)
    engine = make_engine(config, clock, pause=_one_second)
    engine.submit(ask("first", [9] * 200, 1), "gateway")
    assert run_until_idle(engine).receipts["first"].busy_us == 1_000_000, "alone in its step"
    engine.submit(ask("cached", [9] * 200, 1), "gateway")
    engine.submit(ask("short", [5] * 4, 1, namespace="other"), "gateway")
    receipts = run_until_idle(engine).receipts
    # Four tokens of each are computed, after 196 and 0 positions: 240 and 44 of work.
    assert receipts["cached"].computed == receipts["short"].computed == 4
    assert receipts["cached"].busy_us == round(240 / 284 * 1e6)
    assert receipts["short"].busy_us == round(44 / 284 * 1e6)


def test_an_aborted_request_has_the_time_that_it_took() -> None:
    clock = Clock()

    def _two_seconds(_: StepBatch) -> None:
        clock.now += 2.0

    engine = make_engine(make_config(step_s=0.0), clock, pause=_two_seconds)
    engine.submit(ask("gone", [5] * 4, 50), "gateway")
    engine.submit(ask("never", [5] * 4, 50, deadline_s=0.5), "gateway")
    clock.now += 1.0
    engine.step()
    engine.abort("gone")
    receipts = run_until_idle(engine).receipts
    assert receipts["gone"].busy_us == 2_000_000
    assert receipts["never"].busy_us == 0


def test_the_work_of_a_row_is_what_it_reads_and_computes() -> None:
    work = ModelWork(weight_bytes=640, token_flops=300, position_bytes=3, position_flops=20)
    # A token of 64 reads 10 bytes of the weights. 300 operations are 3 bytes, and 20 on each of 101
    # positions are 20.2 bytes; 101 positions are read, of 3 bytes.
    assert work.of_row(row(1, 100), 64) == pytest.approx(10 + 3 + 20.2 + 303)
    # Three tokens after 10 positions see 11, 12 and 13.
    assert work.of_row(row(3, 10), 64) == pytest.approx(30 + 9 + 20 * 36 / 100 + 39)
    # Half of the layers see 8 positions at most: (101 + 8) / 2 on average.
    windowed = dataclasses.replace(work, window=8, full_share=0.5)
    assert windowed.of_row(row(1, 100), 64) == pytest.approx(10 + 3 + 54.5 * 0.2 + 54.5 * 3)


def test_the_work_of_a_model_is_counted_from_its_shape() -> None:
    spec = base_spec(SHAPE)
    # By layer: queries and output 2 × 8 × 8, keys and values 2 × 8 × 4, MLP 3 × 8 × 16: 576 weights.
    assert model_work(spec, 5000, 32) == ModelWork(5000, 2 * 1152, 32, 4 * 2 * 8, 0, 1.0)
    experts = ExpertsSpec(count=4, active=2, intermediate=4, layers=frozenset({1}), shared=1)
    mixed = dataclasses.replace(spec, experts=experts, windows=(None, 16))
    # The second layer's MLP: two experts of 3 × 8 × 4, and a shared one of 3 × 8 × 1.
    assert model_work(mixed, 5000, 32) == ModelWork(
        5000, 2 * (2 * 192 + 384 + 216), 32, 64, 16, 0.5
    )
