"""Embeddings of prompts: the pooled states of `transformers`, on any path through the scheduler."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import RequestError
from engine.loop import Engine
from engine.models.pooling_files import declared_pooling
from engine.protocol import Receipt
from engine.runners.fake import FakeRunner
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    save_adapter,
    save_checkpoint,
)
from tests.engine.cpu_engine import engine_of
from tests.engine.helpers import ask, make_config, make_engine

PROMPT = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()
POOLINGS = ("last", "mean", "cls")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


class Heard:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.vectors: dict[str, np.ndarray] = {}
        self.tokens: dict[str, list[int]] = {}
        self.receipts: dict[str, Receipt] = {}

    def run(self) -> "Heard":
        while self.engine.busy:
            self.engine.step()
            self.take()
        self.engine.check_integrity()
        return self

    def take(self) -> None:
        for outbox in self.engine.take_outboxes().values():
            for chunk in outbox.chunks:
                self.tokens.setdefault(chunk.request_id, []).extend(chunk.tokens)
                if chunk.embedding is not None:
                    assert chunk.request_id not in self.vectors
                    self.vectors[chunk.request_id] = np.frombuffer(chunk.embedding, "<f4")
            self.receipts |= {each.request_id: each for each in outbox.receipts}


def expected(model: torch.nn.Module, prompt: list[int], pooling: str) -> np.ndarray:
    """`hidden_states[-1]` of `transformers` is after the final norm."""
    with torch.inference_mode():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    states = output.hidden_states[-1][0]
    pooled = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
    return np.asarray(pooled.float().numpy())


@pytest.mark.parametrize("budget", [512, 16])
def test_they_are_those_of_transformers(llama: Path, budget: int) -> None:
    heard = Heard(engine_of(llama, max_batch_tokens=budget, max_running=8))
    prompts = {f"{p}{n}": PROMPT[n:] for p in POOLINGS for n in (0, 40, 69)}
    for name, prompt in prompts.items():
        heard.engine.submit(ask(name, prompt, 0, pooling=name.rstrip("0469")), "me")
    heard.engine.submit(ask("text", PROMPT[3:30], 5), "me")
    heard.run()
    model = reference(llama)
    for name, prompt in prompts.items():
        wanted = expected(model, prompt, name.rstrip("0469"))
        np.testing.assert_allclose(heard.vectors[name], wanted, atol=2e-5, err_msg=name)
        receipt = heard.receipts[name]
        assert (receipt.prompt, receipt.generated, receipt.delivered) == (len(prompt), 0, 0)
        assert receipt.cached + receipt.computed == len(prompt)
    assert len(heard.tokens["text"]) == 5


def test_a_final_norm_and_scales_of_another_family(tmp_path: Path) -> None:
    gemma = save_checkpoint(tmp_path, "Gemma2", head_dim=16)
    heard = Heard(engine_of(gemma))
    heard.engine.submit(ask("a", PROMPT, 0, pooling="mean"), "me")
    heard.run()
    wanted = expected(reference(gemma), PROMPT, "mean")
    np.testing.assert_allclose(heard.vectors["a"], wanted, atol=1e-4)


def test_an_adapter_gives_its_own(llama: Path, tmp_path: Path) -> None:
    path = save_adapter(llama, tmp_path / "a", 4, 4)
    heard = Heard(engine_of(llama, enable_lora=True))
    digest = heard.engine.load_adapter(str(path)).digest
    for pooling in POOLINGS:
        heard.engine.submit(ask(pooling, PROMPT, 0, pooling=pooling, adapter=digest), "me")
    heard.run()
    model = adapted_reference(llama, path)
    for pooling in POOLINGS:
        wanted = expected(model, PROMPT, pooling)
        np.testing.assert_allclose(heard.vectors[pooling], wanted, atol=2e-5)


def test_only_the_last_state_may_come_after_a_cached_prefix(llama: Path) -> None:
    heard = Heard(engine_of(llama))
    heard.engine.submit(ask("first", PROMPT, 1), "me")
    heard.run()
    for pooling in POOLINGS:
        heard.engine.submit(ask(pooling, PROMPT, 0, pooling=pooling), "me")
    heard.run()
    assert {p: heard.receipts[p].cached for p in POOLINGS} == {"last": 64, "mean": 0, "cls": 0}
    model = reference(llama)
    for pooling in POOLINGS:
        wanted = expected(model, PROMPT, pooling)
        np.testing.assert_allclose(heard.vectors[pooling], wanted, atol=2e-5)


def test_a_preempted_prompt_is_pooled_once(llama: Path) -> None:
    """A mean that was half summed begins again."""
    heard = Heard(engine_of(llama, num_blocks=12, max_batch_tokens=16, max_running=8))
    heard.engine.submit(ask("low", PROMPT, 0, pooling="mean"), "me")
    for _ in range(3):
        heard.engine.step()
    heard.engine.submit(ask("high", PROMPT[::-1] * 2, 3, priority=5), "me")
    heard.run()
    assert heard.engine.metrics.counters["preemptions"] > 0
    assert heard.receipts["low"].recomputed > 0
    np.testing.assert_allclose(
        heard.vectors["low"], expected(reference(llama), PROMPT, "mean"), atol=2e-5
    )


def test_a_prompt_may_fill_the_context(llama: Path) -> None:
    heard = Heard(engine_of(llama))
    whole = (PROMPT * 4)[:256]
    heard.engine.submit(ask("a", whole, 0, pooling="mean"), "me")
    heard.run()
    np.testing.assert_allclose(
        heard.vectors["a"], expected(reference(llama), whole, "mean"), atol=2e-5
    )
    with pytest.raises(RequestError, match="257 tokens: the model's context is 256"):
        heard.engine.submit(ask("b", [*whole, 5], 0, pooling="mean"), "me")


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        (["pooling_mode_mean_tokens"], "mean"),
        (["pooling_mode_cls_token"], "cls"),
        (["pooling_mode_lasttoken"], "last"),
        (["pooling_mode_max_tokens"], ""),
        (["pooling_mode_mean_tokens", "pooling_mode_cls_token"], ""),
    ],
)
def test_the_models_files_choose(tmp_path: Path, modes: list[str], pooling: str) -> None:
    assert declared_pooling(tmp_path) == "last"
    folder = tmp_path / "1_Pooling"
    folder.mkdir()
    content = dict.fromkeys(modes, True) | {"word_embedding_dimension": 64}
    (folder / "config.json").write_text(json.dumps(content))
    assert declared_pooling(tmp_path) == pooling
    (folder / "config.json").write_text("[")
    assert declared_pooling(tmp_path) == ""


def test_a_request_that_names_no_pooling_gets_the_models(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    heard = Heard(engine_of(checkpoint))
    assert heard.engine.info.pooling == "mean"
    heard.engine.submit(ask("a", PROMPT, 0, pooling="model"), "me")
    heard.run()
    np.testing.assert_allclose(
        heard.vectors["a"], expected(reference(checkpoint), PROMPT, "mean"), atol=2e-5
    )


@pytest.mark.parametrize("overlapped", [False, True])
def test_any_schedule_gives_each_request_one_vector(overlapped: bool) -> None:
    config = make_config(num_blocks=24, max_batch_tokens=16)
    heard = Heard(make_engine(config, overlapped=overlapped))
    for n in range(12):
        pooling = (*POOLINGS, "")[n % 4]
        prompt = [1 + (n * 31 + i) % 900 for i in range(10 + 2 * n)]
        inputs = ask(f"r{n}", prompt, 0 if pooling else 6, pooling=pooling, priority=n // 4)
        heard.engine.submit(inputs, "me")
        heard.engine.step()
        heard.take()
    heard.run()
    assert heard.vectors.keys() == {f"r{n}" for n in range(12) if n % 4 != 3}
    assert all(each.unprocessed == 0 for each in heard.receipts.values())
    counters = heard.engine.metrics.counters
    assert counters["generated_tokens"] == 3 * 6


def test_states_that_are_not_finite_end_the_request(llama: Path) -> None:
    engine = engine_of(llama)
    engine._runner._model.decoder.norm.weight[3] = float("nan")  # type: ignore[attr-defined]
    heard = Heard(engine)
    engine.submit(ask("a", PROMPT, 0, pooling="mean"), "me")
    heard.run()
    assert heard.receipts["a"].finish_reason == "error" and heard.receipts["a"].prompt == 0
    assert "not finite" in heard.receipts["a"].message and not heard.vectors


def test_what_cannot_be_computed_is_refused() -> None:
    engine = make_engine()
    for wrong, text in (
        ({"pooling": "max"}, "pooling is max: it must be last, mean, cls or model"),
        ({"pooling": "last", "max_tokens": 3}, "max_tokens is 3: it must be 0 with pooling"),
        ({"pooling": "last", "n": 2}, "n is 2: it must be 1 with pooling"),
        ({"pooling": "mean", "prompt_logprobs": 1}, "prompt_logprobs is 1"),
    ):
        fields = {"max_tokens": 0} | wrong
        with pytest.raises(RequestError, match=text):
            engine.submit(ask("a", [1, 2], **fields), "me")  # type: ignore[arg-type]
    config = make_config()
    runner = FakeRunner(config)
    runner.info = replace(runner.info, pooling="")  # as of a GPU
    with pytest.raises(RequestError, match="computes no embeddings: use one on a CPU"):
        Engine(config, runner).submit(ask("a", [1, 2], 0, pooling="last"), "me")
