"""Speculation, grammars and the overlapped loop, each beside the same engine without it.

    python -m benchmarks.decoding [--model DIR_OR_FILE] [--quick] [--rounds N] [--threads N]
                                  [--only PART] [--draft-heads DIR] [--draft-model DIR_OR_FILE]

The default model is the demo's, with its own draft heads. Chats ask what the heads were not trained
on. What is compared runs in turn in one process, round after round; a
figure is that of the round with the median ratio. The overlapped loop runs in simulated time.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.report import figure, median_pair, processor_times, progress, stolen_since
from engine.batch import Row, Runner, StepBatch
from engine.config import EngineConfig
from engine.decoding.grammar.grammars import Grammars
from engine.demo.paths import MODEL_DIR
from engine.loop import Engine
from engine.models.tokenizer_file import tokenizer_json
from engine.protocol import GenerateRequest, Grammar, SamplingParams
from engine.runners.cpu.runner import load_runner
from engine.runners.fake import FakeRunner
from engine.scheduling.sequence import Sequence
from training.demo.chat import Turn, head, written
from training.demo.dialogues import make_dialogues
from training.demo.settings import OTHER_HEADS, SEED
from training.smollm2.answers import prompt_of
from training.smollm2.questions import make_questions

_TEXT = """The harbour keeps a book of every ship. Each entry has the ship's name, its owner, the day on
which it came, the day on which it left, and the goods that it carried. A clerk writes the entry when
the ship has tied up, and signs it when the ship has gone. Nobody may change an entry later; a clerk
who finds a mistake writes a new entry that names the old one. At the end of each month the master of
the harbour counts the entries, compares the goods with the duties that were paid, and writes the sum
on a page of its own. The pages are bound once a year and kept for thirty years in an archive under
the tower, which two keys open, and nobody holds both of them."""
_EDITS = {"ship": "boat", "clerk": "scribe", "thirty": "forty", "tower": "gate"}
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "amount": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["in", "out", "refund"]},
        "note": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "amount", "kind", "note"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _RECORD, "minItems": 40, "maxItems": 40}

PARTS = ["look-up", "chat", "random", "schema", "masks", "overlap"]
_NO_DRAFTS: dict[str, Any] = {"draft_model": None, "draft_heads": "auto"}  # the runner has them

Work = Callable[[str], float]  # tokens a second with `speculation` set to this


class Bench:
    def __init__(self, model: Path, threads: int | None, *, quick: bool, **drafting: Any) -> None:
        """drafting: `draft_heads` or `draft_model` of EngineConfig."""
        text = tokenizer_json(model)
        if text is None:
            raise SystemExit(f"{model} has no tokenizer")
        self.tokenizer = Tokenizer.from_str(text)
        self.config = EngineConfig(
            model=str(model), num_blocks=1024, max_batch_tokens=512, threads=threads, dtype="auto",
            **drafting,
        )  # fmt: skip
        self.runner: Runner = load_runner(self.config)
        self.requests, self.tokens, self.copied = (4, 8, 150) if quick else (32, 96, 400)
        prompts = _new_chats(1 if quick else 12, demo=model == MODEL_DIR)
        self.chats = [self.ids(prompt) for prompt in prompts]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def rate(
        self,
        requests: list[tuple[list[int], SamplingParams]],
        setting: str,
        *,
        forced: bool = True,
    ) -> float:
        """Tokens a second after the first token of the last request. forced: whether what grammars
        force may be guessed."""
        config = replace(self.config, speculation=setting, prefix_cache=False, **_NO_DRAFTS)
        engine = Engine(config, self.runner)
        if not forced:
            engine.scheduler.speculation.forced = None
        for number, (prompt, sampling) in enumerate(requests):
            engine.submit(GenerateRequest(f"r{number}", "t", prompt, sampling), "g")
        begun, tokens, waiting = 0.0, 0, len(requests)
        while engine.busy:
            engine.step()
            for outbox in engine.take_outboxes().values():
                for chunk in outbox.chunks:
                    tokens += len(chunk.tokens) if not waiting else 0
            if waiting:
                waiting = sum(r.first_token_at is None for r in engine.requests.values())
                begun = time.perf_counter()
        self.counters = engine.metrics.counters
        return tokens / max(time.perf_counter() - begun, 1e-9)

    def chat(self, setting: str) -> float:
        """Chats one after another, greedily: tokens a second after the first of each."""
        engine = Engine(replace(self.config, speculation=setting, **_NO_DRAFTS), self.runner)
        most = 24 if len(self.chats) == 1 else 128
        sampling = SamplingParams(max_tokens=most, temperature=0.0)
        tokens, spent = 0, 0.0
        for number, prompt in enumerate(self.chats):
            engine.submit(GenerateRequest(f"c{number}", "t", prompt, sampling), "g")
            begun: float | None = None
            while engine.busy:
                engine.step()
                for outbox in engine.take_outboxes().values():
                    for chunk in outbox.chunks:
                        tokens += len(chunk.tokens) if begun is not None else 0
                        begun = time.perf_counter() if begun is None else begun
            spent += time.perf_counter() - (begun or 0.0)
        self.counters = engine.metrics.counters
        return tokens / max(spent, 1e-9)

    def copy(self, setting: str) -> float:
        """One request whose answer is its prompt's text with some words replaced: a grammar fixes
        the answer, because a small model copies badly. What the grammar forces is not guessed."""
        answer = re.sub(r"\w+", lambda word: _EDITS.get(word[0], word[0]), _TEXT)
        grammar = Grammar("regex", re.escape(answer).replace(r"\ ", " ").replace("\\\n", "\n"))
        sampling = SamplingParams(max_tokens=self.copied, temperature=0.0, grammar=grammar)
        prompt = self.ids(f"{_TEXT}\n\n{_TEXT}\n\n")
        return self.rate([(prompt, sampling)], setting, forced=False)

    def noise(self, setting: str, grammar: Grammar | None = None) -> float:
        """Prompts of random ids, and answers of high temperature."""
        draw, vocab = random.Random(11), self.runner.info.vocab_size
        sampling = SamplingParams(
            max_tokens=self.tokens, temperature=1.0, ignore_eos=True, seed=5, grammar=grammar
        )
        prompts = [[draw.randrange(3, vocab) for _ in range(48)] for _ in range(self.requests)]
        return self.rate([(prompt, sampling) for prompt in prompts], setting)

    def constrained(self, setting: str) -> float:
        return self.noise(setting, Grammar("json_schema", json.dumps(_SCHEMA)))

    def mask_times(self) -> list[float]:
        """Milliseconds from a row to its mask, at each token of answers that match the schema."""
        info = self.runner.info
        text = tokenizer_json(Path(self.config.model))
        grammars = Grammars(lambda: text, info.vocab_size, info.eos_token_ids)
        grammar = Grammar("json_schema", json.dumps(_SCHEMA))
        grammars.prepare(grammar)
        sampling = SamplingParams(max_tokens=10_000, grammar=grammar)
        times: list[float] = []
        for number in range(3):
            history = self._said(number)
            for end in range(len(history)):
                row = Row(
                    number, [0], end, [], None, True, sampling, 0, [0, *history[:end]], prompt_len=1
                )
                since = time.perf_counter()
                begun = grammars.matchers.begin([row])
                assert begun is not None
                grammars.matchers.finish(begun, None)
                times.append(1000 * (time.perf_counter() - since))
                grammars.matchers.accept(row, history[end : end + 1])
        return sorted(times)

    def _said(self, number: int) -> list[int]:
        draw = random.Random(number)
        kinds = ["in", "out", "refund"]
        records = [
            {
                "name": f"ship {draw.randrange(99)}",
                "amount": draw.randrange(5000),
                "kind": draw.choice(kinds),
                "note": "paid at the gate",
            }
            for _ in range(40)
        ]
        return self.ids(json.dumps(records))


def _new_chats(count: int, *, demo: bool) -> list[str]:
    """Prompts that `training.draft_heads` does not train on."""
    if demo:
        dialogues = make_dialogues(4 * count, seed=31, hurried=True)
        prompts = [written(each[:-1]) + head(Turn("assistant", "")) for each in dialogues]
        return sorted(prompts, key=len)[:count]
    trained = {each.text for each in make_questions(OTHER_HEADS.prompts, SEED)}
    asked = [each for each in make_questions(600, 31) if each.text not in trained]
    return [prompt_of(each) for each in asked[:count]]


def _is_ready(seq: Sequence) -> bool:
    """Whether it has a token to compute, and more to say than the tokens that are under way."""
    most = seq.request.inputs.sampling.max_tokens
    return seq.remaining > 0 and seq.output_len + seq.pending < most


def full_steps() -> float:
    """The share, in per cent, of the overlapped loop's steps in which every ready sequence has a row:
    32 requests that arrive one after another and end at different steps."""
    config = EngineConfig(model="fake", num_blocks=4096, max_running=64)
    clock = [0.0]
    batches: list[tuple[int, int]] = []

    def note(batch: StepBatch) -> None:
        clock[0] += 0.01
        having = {row.seq for row in batch.rows}
        lacking = [s for s in engine.scheduler.running if s.number not in having and _is_ready(s)]
        batches.append((len(batch.rows), len(batch.rows) + len(lacking)))

    runner = FakeRunner(config, overlapped=True, pause=note)
    engine = Engine(config, runner, clock=lambda: clock[0])
    draw, step = random.Random(3), 0
    while engine.busy or step < 32:
        if step < 32:
            sampling = SamplingParams(max_tokens=draw.randrange(20, 200), ignore_eos=True)
            prompt = [draw.randrange(1000) for _ in range(20)]
            engine.submit(GenerateRequest(f"r{step}", "t", prompt, sampling), "g")
        engine.step()
        engine.take_outboxes()
        step += 1
    return 100 * sum(rows == ready for rows, ready in batches) / len(batches)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="default: the demo model")
    parser.add_argument("--quick", action="store_true", help="few tokens: tries the script")
    parser.add_argument("--rounds", type=int, help="default 5, and 1 with --quick")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    parser.add_argument("--draft-heads", default="auto", help="as the engine's option")
    parser.add_argument("--draft-model", help="chats with this one in place of heads")
    chosen = parser.parse_args(arguments)
    drafting = {"draft_heads": chosen.draft_heads}
    if chosen.draft_model:
        drafting = {"draft_model": chosen.draft_model, "draft_heads": "none"}
    bench = Bench(chosen.model, chosen.threads, quick=chosen.quick, **drafting)
    count = chosen.rounds or (1 if chosen.quick else 5)
    about: dict[str, Any] = {"model": chosen.model.name, "rounds": count, "quick": chosen.quick}
    parts = PARTS if chosen.only is None else [chosen.only]
    if "look-up" in parts:
        _beside(
            "prompt look-up, edited copy, one request",
            (bench.copy, "auto"), (bench.copy, "off", "without"), (1.8, 3.0), count, about,
        )  # fmt: skip
    if "chat" in parts and bench.runner.drafter is not None:
        drafts = "draft model" if chosen.draft_model else "draft heads"
        _beside(
            f"{drafts}, ordinary chat, one request",
            (bench.chat, "auto"), (bench.chat, "off", "without"), (1.2, 1.6), count, about,
        )  # fmt: skip
    bench.runner.drafter = None  # the others are about guesses by look-up
    many = f"{bench.requests} requests"
    if "random" in parts:
        _beside(
            f"speculation on, random text, {many}",
            (bench.noise, "auto"), (bench.noise, "off", "without"), (0.97, 1.0), count, about,
        )  # fmt: skip
    if "schema" in parts:
        for setting, guesses in (("auto", ""), ("off", ", without guesses")):
            _beside(
                f"JSON schema on all of {many}{guesses}",
                (bench.constrained, setting), (bench.noise, setting, "free text"), (0.9, 0.97),
                count, about,
            )  # fmt: skip
    if "masks" in parts:
        _masks(bench, about)
    if "overlap" in parts:
        figure(
            "decoding: overlapped loop, steps with all ready rows", full_steps(), "%", True,
            at_least=99.0, aim=100.0, settings={"simulated": True},
        )  # fmt: skip
    return 0


def _masks(bench: Bench, about: dict[str, Any]) -> None:
    times = bench.mask_times()
    for name, share, at_least, aim in (("p50", 0.5, 0.3, 0.05), ("p99", 0.99, 3.0, 1.0)):
        value = times[int(share * (len(times) - 1))]
        figure(
            f"decoding: mask of a cached schema, {name}", value, "ms", False,
            at_least=at_least, aim=aim, settings=about | {"masks": len(times)},
        )  # fmt: skip


def _beside(
    name: str,
    ours: tuple[Work, str],
    theirs: tuple[Work, str, str],
    limits: tuple[float, float],
    count: int,
    about: dict[str, Any],
) -> None:
    rates: tuple[list[float | None], list[float | None]] = [], []
    before = processor_times()
    for number in range(count + 1):
        for which, (work, setting) in enumerate((ours, theirs[:2])):
            rate = work(setting)
            progress(f"{name}: {setting} {rate:.1f} tok/s")
            if number:  # the first round is a warm-up
                rates[which].append(rate)
    pair = median_pair(*rates)
    if pair is not None:
        settings = about | {"stolen_percent": stolen_since(before)}
        figure(
            f"decoding: {name}", pair[0], "tok/s", True, theirs[2], pair[1],
            at_least=limits[0], aim=limits[1], settings=settings,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
