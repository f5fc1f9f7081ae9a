"""Log-probabilities of prompt tokens: those of `transformers`, on any path through the scheduler."""

from pathlib import Path

import pytest
import torch

from engine.errors import RequestError
from engine.loop import Engine
from engine.protocol import PromptLogprob, Receipt
from engine.runners.fake import FakeRunner
from engine.scheduling import scheduler
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


class Heard:
    """What the engine has said of each request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scores: dict[str, list[PromptLogprob]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.receipts: dict[str, Receipt] = {}

    def run(self) -> "Heard":
        while self.engine.busy:
            self.engine.step()
            for outbox in self.engine.take_outboxes().values():
                for chunk in outbox.chunks:
                    key = chunk.request_id, chunk.choice
                    self.tokens.setdefault(key, []).extend(chunk.tokens)
                    if chunk.prompt_logprobs is not None:
                        assert chunk.request_id not in self.scores and chunk.choice == 0
                        self.scores[chunk.request_id] = chunk.prompt_logprobs
                self.receipts |= {each.request_id: each for each in outbox.receipts}
        self.engine.check_integrity()
        return self


def check_against(model: torch.nn.Module, prompt: list[int], scores: list[PromptLogprob]) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert [each.token for each in scores] == prompt
    assert scores[0] == PromptLogprob(prompt[0])
    for position, each in enumerate(scores[1:]):
        row = expected[position]
        assert each.logprob == pytest.approx(row[each.token].item(), abs=1e-3)
        ids, values = zip(*each.top, strict=True)
        assert values == pytest.approx(row.topk(len(ids)).values.tolist(), abs=1e-3)
        assert [row[n].item() for n in ids] == pytest.approx(values, abs=1e-3)
        better = row > row[each.token]
        assert abs(each.rank - 1 - int(better.sum())) <= 1  # nearly equal ones may change places


@pytest.mark.parametrize("most", [256, 9])
def test_they_are_those_of_transformers(
    llama: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(scheduler, "MAX_SCORED", most)
    heard = Heard(engine_of(llama))
    heard.engine.submit(ask("a", PROMPT, 3, prompt_logprobs=3), "me")
    heard.engine.submit(ask("b", PROMPT[:33], 3), "me")
    heard.engine.submit(ask("c", PROMPT[5:], 1, prompt_logprobs=1, logprobs=2), "me")
    heard.run()
    model = reference(llama)
    assert heard.scores.keys() == {"a", "c"}
    check_against(model, PROMPT, heard.scores["a"])
    check_against(model, PROMPT[5:], heard.scores["c"])


def test_an_adapter_gives_its_own(llama: Path, tmp_path: Path) -> None:
    path = save_adapter(llama, tmp_path / "a", 4, 4)
    heard = Heard(engine_of(llama, enable_lora=True))
    digest = heard.engine.load_adapter(str(path)).digest
    heard.engine.submit(ask("a", PROMPT, 1, prompt_logprobs=1, adapter=digest), "me")
    heard.engine.submit(ask("b", PROMPT, 1, prompt_logprobs=1), "me")
    heard.run()
    check_against(adapted_reference(llama, path), PROMPT, heard.scores["a"])
    check_against(reference(llama), PROMPT, heard.scores["b"])


def test_a_cached_prompt_is_computed_again_and_the_receipt_says_so(llama: Path) -> None:
    heard = Heard(engine_of(llama))
    answers = {}
    for name, wanted in (("first", None), ("cached", None), ("scored", 1), ("after", None)):
        heard.engine.submit(ask(name, PROMPT, 4, prompt_logprobs=wanted), "me")
        heard.run()
        answers[name] = heard.tokens[name, 0]
    cached = {name: each.cached for name, each in heard.receipts.items()}
    assert cached == {"first": 0, "cached": 64, "scored": 0, "after": 64}
    assert all(each.cached + each.computed == 70 for each in heard.receipts.values())
    assert len({tuple(each) for each in answers.values()}) == 1
    check_against(reference(llama), PROMPT, heard.scores["scored"])


def test_no_tokens_need_be_generated(llama: Path) -> None:
    heard = Heard(engine_of(llama))
    heard.engine.submit(ask("a", PROMPT, 0, prompt_logprobs=1, n=2), "me")
    heard.engine.submit(ask("one", PROMPT[:1], 0, prompt_logprobs=1), "me")
    heard.run()
    check_against(reference(llama), PROMPT, heard.scores["a"])
    assert heard.scores["one"] == [PromptLogprob(PROMPT[0])]
    for name, prompt in (("a", 70), ("one", 1)):
        receipt = heard.receipts[name]
        assert (receipt.prompt, receipt.computed, receipt.generated) == (prompt, prompt, 0)
        assert receipt.delivered == 0 and receipt.finish_reason == "length"


@pytest.mark.parametrize("overlapped", [False, True])
def test_preempted_prompts_are_scored_once(
    monkeypatch: pytest.MonkeyPatch, overlapped: bool
) -> None:
    """More prompts than memory, of several priorities, scored seven tokens a step."""
    monkeypatch.setattr(scheduler, "MAX_SCORED", 7)
    config = make_config(num_blocks=24, max_batch_tokens=16)
    heard = Heard(make_engine(config, overlapped=overlapped))
    prompts = {f"r{n}": [1 + (n * 31 + i) % 900 for i in range(20 + n)] for n in range(9)}
    for n, (name, prompt) in enumerate(prompts.items()):
        inputs = ask(name, prompt, n % 3 * 8, prompt_logprobs=0, priority=n // 3, n=1 + n % 2)
        heard.engine.submit(inputs, "me")
        heard.engine.step()
    heard.run()
    assert heard.engine.metrics.counters["preemptions"] > 0
    for n, (name, prompt) in enumerate(prompts.items()):
        assert [each.token for each in heard.scores[name]] == prompt
        assert heard.receipts[name].generated == (1 + n % 2) * (n % 3 * 8)


def test_what_cannot_be_computed_is_refused() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="max_tokens is 0: it must be at least 1, or with"):
        engine.submit(ask("a", [1, 2], 0), "me")
    with pytest.raises(RequestError, match="prompt_logprobs is -1"):
        engine.submit(ask("a", [1, 2], 1, prompt_logprobs=-1), "me")
    config = make_config()
    runner = FakeRunner(config)
    runner.scores_prompts = False  # as of a GPU
    with pytest.raises(RequestError, match="prompt_logprobs is computed on a CPU only"):
        Engine(config, runner).submit(ask("a", [1, 2], 1, prompt_logprobs=1), "me")
