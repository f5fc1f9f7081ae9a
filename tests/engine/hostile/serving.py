"""What a model's or an adapter's files go through before, and while, they serve a request."""

from pathlib import Path

from core.settings import Settings
from engine.loop import Engine
from engine.model_spec import ModelSpec
from engine.models.tokenizer_file import tokenizer_digest
from engine.protocol import GenerateRequest, SamplingParams
from gateway.catalog.adapter_archive import read_adapter
from gateway.catalog.checkpoint import check_servable
from gateway.catalog.model_files import served_model
from gateway.prompts.rendering import render_chat
from tests.engine.cpu_engine import engine_of

PROMPT = [5, 9, 12, 40, 33, 71, 8]
_TOKENS = 4
_TEXTS = ("hello world", "a" * 300 + "!", "Gr\u00fc\u00dfe \U0001f600\n\n  x", "<|im_end|> x", "")


class NoAnswer(Exception):
    """A model that was loaded fails at a plain request."""


def serve_model(path: Path, *, must_answer: bool) -> str:
    """By the engine: loads and answers. A value in a weight may make answers impossible; one in a
    configuration must be refused at once."""
    text = answered(engine_of(path, num_blocks=24))
    if must_answer and "error" in text:
        raise NoAnswer(text)
    return text


def answered(engine: Engine, adapter: str | None = None) -> str:
    sampling = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    prompt = PROMPT[: max(1, engine.info.context_length - 1)]
    engine.submit(GenerateRequest("r", "t", prompt, sampling, adapter), "g")
    ids: list[int] = []
    for _ in range(200):
        engine.step()
        for outbox in engine.take_outboxes().values():
            ids += [each for chunk in outbox.chunks for each in chunk.tokens]
            for receipt in outbox.receipts:
                return f"{ids} {receipt.finish_reason} {receipt.message}"
    raise AssertionError("no receipt after 200 steps")


def read_by_gateway(path: Path, settings: Settings) -> str:
    """Reads configuration, tokenizer and template; encodes, decodes and renders."""
    check_servable(path)
    model = served_model(settings, path)
    tokenizer_digest(path)
    codec, found = model.codec, []
    assert codec is not None
    for text in _TEXTS:
        ids = codec.encode(text)
        shower = codec.detokenizer()
        "".join(shower.feed(each) for each in ids)
        found.append(len(codec.decode(ids)))
        for each in ids[:20]:
            codec.token_bytes(each)
        if codec.template is not None:
            found.append(len(render_chat("m", _chat(text), None, codec).ids()))
    return f"{found} {codec.eos_token_ids} {model.defaults}"


def _chat(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def serve_adapter(
    engine: Engine, spec: ModelSpec, directory: Path, *, by_gateway: bool = True
) -> str:
    """By the gateway's reading at its upload, and by the engine. spec: of the base model."""
    if by_gateway:
        read_adapter(directory).check_served(spec)
    return answered(engine, engine.load_adapter(str(directory)).digest)
