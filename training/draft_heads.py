"""Trains draft heads for a served model on a CPU: `python -m training.draft_heads`.

The data are the model's own answers, half of them greedy: heads guess what this model says next. From
the state that gave a token and from the token, the network predicts the next state, and from that one
and the token after it the state that follows, `_CHAIN` times (`engine.speculation.heads`).

Without options it makes the heads of the demo model again. With `--model smollm2.gguf` it asks everyday
questions in ChatML, with `--prompts FILE` the file's prompts, a JSON string in each line.
"""

import argparse
import json
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.backends.cpu.operations import CpuOperations
from engine.backends.layers.kv import KvPool
from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.rotary import rotary_tables
from engine.backends.layers.step import StepPlanner, order_rows
from engine.batch import Row
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.loop import Engine
from engine.models.checkpoint import DRAFT_HEADS, open_checkpoint
from engine.models.load import LoadedModel, load_model
from engine.models.tokenizer_file import tokenizer_json
from engine.models.usual_names import usual_names
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner
from engine.speculation.heads_file import FORMAT, vocabulary_digest
from training.demo import settings
from training.demo.chat import Turn, head, written
from training.demo.dialogues import make_dialogues
from training.demo.fit import rate_at
from training.demo.recipe import record
from training.demo.settings import HEADS, HeadsPlan
from training.smollm2.answers import prompt_of
from training.smollm2.questions import make_questions

_CHAIN = 4  # guesses that are learnt one after another
_LATER = 0.8  # the weight of each guess beside the one before it
_LONGEST_PROMPT = 400  # ids
_EVERYDAY = 600  # questions at most

Example = tuple[list[int], int]  # ids, and where the answer begins


@dataclass(frozen=True)
class Data:
    """Of all answers, one after another: the state that gave each token, the tokens, and where each
    answer ends."""

    states: torch.Tensor  # [tokens, hidden]
    tokens: torch.Tensor
    ends: torch.Tensor


def demo_prompts(count: int) -> list[str]:
    """Dialogues up to the last answer, of the kind that the demo model has learnt."""
    made = make_dialogues(count, settings.SEED + 7, hurried=True)
    return [written(each[:-1]) + head(Turn("assistant", "")) for each in made]


def everyday_prompts(count: int) -> list[str]:
    made = make_questions(min(count, _EVERYDAY), settings.SEED)
    return [prompt_of(question) for question in made]


def answers(model: str, tokenizer: Tokenizer, prompts: list[str], plan: HeadsPlan) -> list[Example]:
    """What the model says: to the even prompts greedily, to the odd ones sampled."""
    config = EngineConfig(
        model=model, threads=1, kv_memory_bytes=1 << 29, draft_heads="none", max_running=32
    )
    engine = Engine(config, load_runner(config))
    asked = [tokenizer.encode(each, add_special_tokens=False).ids for each in prompts]
    asked = [each for each in asked if len(each) <= _LONGEST_PROMPT]
    said: list[list[int]] = [[] for _ in asked]
    waiting = list(enumerate(asked))[::-1]
    while engine.busy or waiting:
        while waiting and len(engine.requests) < config.max_running:
            number, ids = waiting.pop()
            sampling = SamplingParams(
                max_tokens=plan.longest, temperature=0.7 * (number % 2), seed=number
            )
            engine.submit(GenerateRequest(str(number), "heads", ids, sampling), "heads")
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                said[int(chunk.request_id)] += chunk.tokens
    return [(ids + more, len(ids)) for ids, more in zip(asked, said, strict=True) if len(more) > 2]


class _States(CpuOperations):
    """The forward pass up to the states that the logits are computed from."""

    def logits(self, head: Linear, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        self.states = norm(x)
        return self.states


@torch.inference_mode()
def collect(model: LoadedModel, examples: list[Example]) -> Data:
    spec, longest = model.spec, max(len(ids) for ids, _ in examples)
    pool = KvPool(spec, -(-longest // 16), 16, model.dtype, model.device)
    tables = rotary_tables(spec, model.native_context, model.dtype)
    plan = StepPlanner(pool, tables, spec.sights, lambda _decodes, _prefills: None)
    blocks, greedy = list(range(-(-longest // 16))), SamplingParams(max_tokens=1, temperature=0.0)
    states, tokens, ends, count = [], [], [], 0
    for ids, begin in examples:
        row = Row(0, ids[:-1], 0, blocks, None, True, greedy, 0, [], 0)
        inputs = plan(*order_rows([row]), ids[:-1], all_logits=True)
        said = ids[begin:]
        count += len(said)
        states.append(model.decoder(_States(spec, pool, inputs))[begin - 1 :].clone())
        tokens += said
        ends += [count] * len(said)
    return Data(torch.cat(states), torch.tensor(tokens), torch.tensor(ends))


def float_head(model: LoadedModel) -> torch.Tensor:
    """The matrix of the logits, [vocab, hidden]."""
    assert model.path is not None
    spec, checkpoint = model.spec, open_checkpoint(model.path)
    with closing(checkpoint.source) as source:
        tied = spec.tied or spec.head not in usual_names(source, spec)
        name = f"{spec.root}.embed_tokens.weight" if tied else spec.head
        return usual_names(source, spec).read(name, torch.float32)


class Network(torch.nn.Module):
    """The same as `DraftHeads`, with gradients. `ids` are those that may be guessed."""

    def __init__(self, model: LoadedModel, matrix: torch.Tensor, inner: int) -> None:
        super().__init__()
        width = model.spec.hidden
        self.merge = torch.nn.Linear(2 * width, width, bias=False)
        self.gate_up = torch.nn.Linear(width, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, width, bias=False)
        self.matrix, self._embed = matrix, model.decoder.embedding

    def forward(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        size = state.shape[-1:]
        given = F.rms_norm(self._embed(tokens).float(), size)
        x = self.merge(torch.cat((F.rms_norm(state, size), given), -1))
        gate, up = self.gate_up(F.rms_norm(x, size)).chunk(2, -1)
        following: torch.Tensor = x + self.down(F.silu(gate) * up)
        return following


def loss_of(
    network: Network, data: Data, place: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The loss of a batch that begins at the answers' positions `at`, and the share of first guesses
    that are right. place: of each id among those that may be guessed, -1 for the others."""
    state, total, first = data.states[at].float(), torch.zeros(()), 0.0
    for step in range(1, _CHAIN + 1):
        inside = at + step < data.ends[at]
        here = (at + step).clamp(max=len(data.tokens) - 1)
        state = network(state, data.tokens[here - 1])
        wanted = torch.where(inside, place[data.tokens[here]], -1)
        logits = F.linear(state, network.matrix)
        guess = F.cross_entropy(logits, wanted, ignore_index=-1)
        near = F.smooth_l1_loss(state[inside], data.states[here][inside].float())
        total = total + _LATER ** (step - 1) * (guess + near)
        if step == 1:
            known = place[data.tokens[here]][inside]
            first = float((logits[inside].argmax(-1) == known).float().mean())
    return total, first


def train(network: Network, data: Data, place: torch.Tensor, plan: HeadsPlan) -> float:
    """Returns the share of right first guesses in the last tenth."""
    schedule = plan.schedule
    optimiser = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    random = torch.Generator().manual_seed(settings.SEED)
    began, shares = time.monotonic(), []
    for step in range(plan.steps):
        for group in optimiser.param_groups:
            group["lr"] = rate_at((step + 1) / plan.steps, schedule)
        at = torch.randint(len(data.tokens), (plan.batch,), generator=random)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, share = loss_of(network, data, place, at)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
        optimiser.step()
        optimiser.zero_grad()
        shares.append(share)
        if step % 50 == 49:
            spent, mean = time.monotonic() - began, sum(shares[-50:]) / 50
            print(f"step {step + 1}/{plan.steps} right {mean:.3f} after {spent:.0f} s", flush=True)
    last = shares[-max(1, len(shares) // 10) :]
    return sum(last) / len(last)


def save(network: Network, ids: torch.Tensor | None, model: LoadedModel, folder: Path) -> None:
    assert model.path is not None
    tensors = {name: value.detach().bfloat16() for name, value in network.state_dict().items()}
    if ids is not None:
        tensors |= {"ids": ids.int(), "head.weight": network.matrix.bfloat16()}
    about = {"format": FORMAT, "vocabulary": vocabulary_digest(model.spec, model.path)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / DRAFT_HEADS, metadata=about)


def frequent_ids(data: Data, examples: list[Example], count: int, vocab: int) -> torch.Tensor:
    """The ids that the answers and prompts use, the most frequent first, filled up with the first ones
    of the vocabulary: byte-pair encodings number frequent pieces first."""
    seen = Counter(data.tokens.tolist())
    seen.update(token for ids, _ in examples for token in set(ids))
    chosen = [token for token, _ in seen.most_common(count)]
    chosen += [token for token in range(vocab) if token not in seen][: count - len(chosen)]
    return torch.tensor(sorted(chosen))


def make(model_path: Path, prompts: list[str], plan: HeadsPlan, folder: Path) -> float:
    torch.manual_seed(settings.SEED)
    tokenizer = Tokenizer.from_str(tokenizer_json(model_path) or "")
    began = time.monotonic()
    examples = answers(str(model_path), tokenizer, prompts, plan)
    config = EngineConfig(model=str(model_path), threads=1, draft_heads="none")
    model = load_model(config)
    data = collect(model, examples)
    print(f"{len(data.tokens)} tokens after {time.monotonic() - began:.0f} s", flush=True)
    matrix, ids = float_head(model), None
    place = torch.arange(model.spec.vocab)
    if plan.vocabulary:
        ids = frequent_ids(data, examples, plan.vocabulary, model.spec.vocab)
        place = torch.full((model.spec.vocab,), -1)
        place[ids] = torch.arange(len(ids))
        matrix = matrix[ids]
    network = Network(model, matrix, plan.inner)
    share = train(network, data, place, plan)
    save(network, ids, model, folder)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--output", type=Path, help="a folder; default: the model's own")
    parser.add_argument("--prompts", type=Path, help="JSON strings, one in each line")
    chosen = parser.parse_args()
    demo = chosen.model.resolve() == MODEL_DIR
    plan = HEADS if demo else settings.OTHER_HEADS
    if chosen.prompts is not None:
        prompts = [json.loads(line) for line in chosen.prompts.read_text("utf-8").splitlines()]
    else:
        prompts = (demo_prompts if demo else everyday_prompts)(plan.prompts)
    own = chosen.model.parent if chosen.model.is_file() else chosen.model
    share = make(chosen.model, prompts, plan, chosen.output or own)
    print(f"{share:.3f} of the first guesses are right")
    if demo and chosen.output is None:
        record(heads_right=round(share, 3))


if __name__ == "__main__":
    main()
