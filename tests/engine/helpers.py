"""What the engine's core tests share: engines over the fake runner, adapters on disk, a clock."""

import json
from pathlib import Path

from engine.adapters.digest import adapter_digest
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, Receipt, SamplingParams, TokenChunk
from engine.runners.fake import FakeRunner, _mix, _seed, next_token


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_config(**changes: object) -> EngineConfig:
    defaults: dict = {
        "model": "fake",
        "num_blocks": 64,
        "block_size": 4,
        "max_batch_tokens": 64,
        "max_running": 8,
        "max_adapter_slots": 2,
    }
    return EngineConfig(**{**defaults, **changes})


def make_engine(
    config: EngineConfig | None = None, clock: Clock | None = None, **runner: object
) -> Engine:
    config = config or make_config()
    clock = clock or Clock()
    return Engine(config, FakeRunner(config, **runner), clock=clock)


def ask(name: str, prompt: list[int], max_tokens: int = 4, **changes: object) -> GenerateRequest:
    sampling = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        **{k: changes.pop(k) for k in list(changes) if k in SamplingParams.__slots__},
    }
    fields = {"namespace": "acme", **changes}
    return GenerateRequest(
        request_id=name, prompt=list(prompt), sampling=SamplingParams(**sampling), **fields
    )


def write_adapter(folder: Path, name: str, rank: int = 4) -> tuple[str, str]:
    """A directory in PEFT's layout with made-up weights; returns its path and digest."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (path / "adapter_model.safetensors").write_bytes(f"weights of {name}".encode() * 20)
    return str(path), adapter_digest(path)


class Collected:
    """Everything an engine has said, sorted by request."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.receipts: dict[str, Receipt] = {}

    def take(self, engine: Engine) -> None:
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                self.add(chunk)
            for receipt in outbox.receipts:
                assert receipt.request_id not in self.receipts
                self.receipts[receipt.request_id] = receipt

    def add(self, chunk: TokenChunk) -> None:
        key = (chunk.request_id, chunk.choice)
        assert key not in self.reasons, "a token after the end"
        self.tokens.setdefault(key, []).extend(chunk.tokens)
        if chunk.finish_reason is not None:
            self.reasons[key] = chunk.finish_reason.value


def run_until_idle(
    engine: Engine, collected: Collected | None = None, steps: int = 5000
) -> Collected:
    collected = collected or Collected()
    for _ in range(steps):
        engine.step()
        collected.take(engine)
        if not engine.busy:
            engine.check_integrity()
            return collected
    raise AssertionError("the engine did not become idle")


def run_alone(request: GenerateRequest, adapter_path: str | None = None) -> dict[int, list[int]]:
    """What the request gives with nothing else in a roomy engine, by choice."""
    engine = make_engine(make_config(num_blocks=2048, prefix_cache=False, max_waiting=10))
    if adapter_path is not None:
        engine.load_adapter(adapter_path)
    engine.submit(request, "alone")
    found = run_until_idle(engine)
    return {choice: tokens for (_, choice), tokens in found.tokens.items()}


def reference(request: GenerateRequest, choice: int, count: int, vocab: int = 1000) -> list[int]:
    """The tokens that the fake model gives for this request, worked out without any engine."""
    seed = _seed(request.adapter or "")
    state, whole, position = seed, 0, 0
    history = list(request.prompt)
    while len(history) - len(request.prompt) < count:
        for token in history[position:]:
            state = _mix(state ^ seed, token)
            whole = (whole + state * (_mix(11, position) | 1)) & ((1 << 64) - 1)
            position += 1
        token = next_token(whole, position, request.sampling, choice, vocab)
        if token == 0 and position - len(request.prompt) + 1 < request.sampling.min_tokens:
            token = 1
        history.append(token)
    return history[len(request.prompt) :]
