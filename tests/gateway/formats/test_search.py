"""best_of and beam search through the gateway, on the real engine, with openai's client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo.paths import MODEL_DIR
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.own_engine import deployment_on_own_engine, openai_client

TEXT = "A toll is a fee that is paid to use a road. Who pays the toll?"
BEAMS: dict[str, Any] = {"use_beam_search": True, "length_penalty": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("search")
    with deployment_on_own_engine(folder, num_blocks=256) as running:
        yield running


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with openai_client(deployment) as one:
        yield one


def test_beams_are_those_of_transformers(client: OpenAI, deployment: Deployment) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    ids = tokenizer(TEXT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), num_beams=3, do_sample=False,
        num_return_sequences=2, max_new_tokens=7, length_penalty=0.0, pad_token_id=0,
    )  # fmt: skip
    expected = tokenizer.batch_decode(found[:, len(ids) :], skip_special_tokens=True)
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=TEXT, max_tokens=7, n=3, extra_body=BEAMS
    )
    answer = raw.parse()
    assert [choice.text for choice in answer.choices][:2] == expected
    assert answer.usage and answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 21
    event = deployment.event(raw.headers["x-request-id"])
    assert (event["input_tokens"], event["output_tokens"]) == (len(ids), 21)


def test_a_chat_has_beams_too(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=5,
        n=2,
        extra_body={"use_beam_search": True},
    )
    assert len({choice.message.content for choice in answer.choices}) == 2


def test_of_the_best_samples_the_delivered_ones_are_billed(
    client: OpenAI, deployment: Deployment
) -> None:
    sent: dict[str, Any] = {"model": MODEL, "prompt": TEXT, "max_tokens": 6, "seed": 5}
    sent["extra_body"] = {"ignore_eos": True}
    every = client.completions.create(n=4, logprobs=0, temperature=1.5, **sent)
    ranked = sorted(every.choices, key=lambda each: -sum(each.logprobs.token_logprobs))  # type: ignore[union-attr,arg-type]
    raw = client.completions.with_raw_response.create(n=1, best_of=4, temperature=1.5, **sent)
    answer = raw.parse()
    assert [choice.text for choice in answer.choices] == [ranked[0].text]
    assert answer.usage and answer.usage.completion_tokens == 6
    event = deployment.event(raw.headers["x-request-id"])
    assert (event["output_tokens"], event["waived_tokens"]) == (6, 18)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"best_of": 3, "stream": True}, "best_of cannot be combined with stream"),
        (
            {"use_beam_search": True, "stream": True},
            "use_beam_search cannot be combined with stream",
        ),
        ({"best_of": 1, "n": 2}, "best_of is 1; it must be between n=2 and 20"),
        ({"best_of": 21}, "best_of is 21"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty is 11"),
        ({"use_beam_search": True, "top_p": 0.5}, "op_p cannot be combined with use_beam_search"),
        ({"use_beam_search": True, "n": 17}, "beam search has at most 16"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    client: OpenAI, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=5, extra_body=fields, stream=False
        )
