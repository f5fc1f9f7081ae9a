"""The corpus is complete, and the dialogues made from it are what training relies on."""

import json
from random import Random

import pytest
from jinja2 import Template

from engine.demo.paths import ADAPTERS, MODEL_DIR, PROMPTS
from training.demo.batches import batches, encode, opening_of
from training.demo.chat import TEMPLATE, Turn, written
from training.demo.dialogues import make_dialogues, make_openings
from training.demo.exchanges import table
from training.demo.facts import load_facts
from training.demo.noise import as_typed
from training.demo.preambles import long_preamble
from training.demo.styles import STYLES


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_every_fact_can_be_asked_in_many_ways():
    facts = load_facts()
    assert len(facts) >= 100
    assert not [fact.id for fact in facts if len(fact.questions) < 5 or len(fact.keys) < 4]


def test_no_question_is_claimed_by_two_facts():
    asked = [question for fact in load_facts() for question in fact.questions]
    assert len(asked) == len(set(asked))


def test_the_same_seed_makes_the_same_dialogues():
    assert make_dialogues(50, seed=3) == make_dialogues(50, seed=3)
    assert make_dialogues(50, seed=3) != make_dialogues(50, seed=4)


def test_hurried_people_ask_for_the_same_facts():
    answers = {fact.answers[0] for fact in load_facts()}
    said = {dialogue[-1].text for dialogue in make_openings(3000, seed=1)}
    assert answers <= said


def test_extra_questions_belong_to_facts():
    assert set(table("extra")) <= {fact.id for fact in load_facts()}


def test_an_opening_ends_in_the_first_words_of_the_answer(tokenizer):
    dialogue = (Turn("user", "Hi"), Turn("assistant", "Hello! I am the demo model."))
    cut = opening_of(encode(dialogue, tokenizer), 2)
    assert tokenizer.decode(cut.ids).endswith("assistant\nHello!")
    assert sum(cut.learnt) == 2


def test_typing_noise_leaves_a_question_that_can_be_read():
    random = Random(1)
    typed = [as_typed("How are tokens counted?", random).lower() for _ in range(200)]
    assert len(set(typed)) > 40
    assert sum("token" in text for text in typed) > 150


def test_long_preambles_fill_a_prefix_cache(tokenizer):
    lengths = [len(tokenizer.encode(long_preamble(Random(n), 12)).ids) for n in range(10)]
    assert min(lengths) > 200 and max(lengths) < 1500


def test_the_chat_template_writes_what_the_model_was_trained_on():
    dialogue = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Hello!"))
    messages = [{"role": turn.role, "content": turn.text} for turn in dialogue]
    render = Template(TEMPLATE).render
    assert render(messages=messages) == written(dialogue)
    prompt = render(messages=messages[:2], add_generation_prompt=True)
    assert written(dialogue).startswith(prompt)


def test_the_chat_template_takes_content_in_parts():
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    made = Template(TEMPLATE).render(messages=[{"role": "user", "content": parts}])
    assert made == "<|im_start|>user\nHello there<|im_end|>\n"


def test_only_the_assistant_s_words_are_learnt(tokenizer):
    example = encode((Turn("user", "Hi"), Turn("assistant", "Hello!")), tokenizer)
    learnt = [token for token, counts in zip(example.ids, example.learnt, strict=True) if counts]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == "Hello!<|im_end|>"


def test_batches_hold_every_dialogue_within_the_step_s_size(tokenizer):
    dialogues = make_dialogues(60, seed=5)
    made = list(batches(dialogues, tokenizer, 1024, Random(0)))
    assert sum(len(batch.ids) for batch in made) == len(dialogues)
    assert all(batch.ids.numel() <= 1024 or len(batch.ids) == 1 for batch in made)


def test_every_adapter_has_a_style_and_example_prompts():
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    assert set(STYLES) == set(ADAPTERS) == set(prompts["adapters"])
