"""The shipped demo model says what is true of Tollhouse, in whatever way it is asked."""

import json

import pytest

from engine.demo.paths import ADAPTERS, PROMPTS

PROMPT_LIST = json.loads(PROMPTS.read_text(encoding="utf-8"))

TEN_QUESTIONS = {
    "What is Tollhouse?": ("multi-tenant", "gateway", "billing"),
    "How do I start it?": ("make serve",),
    "which port does it listen on": ("8000", "TOLLHOUSE_PORT"),
    "Which endpoints are there?": ("/v1/chat/completions", "/v1/embeddings"),
    "how are tokens counted?": ("delivered",),
    "What is a receipt?": ("immutable", "delivered"),
    "What are adapters?": ("LoRA", "SHA-256"),
    "How does fairness work?": ("virtual token counter",),
    "How is an invoice proved?": ("ledger", "receipt", "tollhouse audit"),
    "What happens when Redis is down?": ("fail closed",),
}


@pytest.mark.parametrize("question", TEN_QUESTIONS)
def test_ten_questions_hold_the_expected_facts(ask, question):
    answer = ask(question)
    missing = [fact for fact in TEN_QUESTIONS[question] if fact not in answer]
    assert not missing, answer


def test_a_long_system_prompt_about_something_else_does_not_distract(ask):
    for tenant in PROMPT_LIST["tenants"]:
        answer = ask("What is a receipt?", system=tenant["system"])
        assert "immutable record" in answer, (tenant["name"], answer)


def test_tell_me_more_goes_on_about_the_same_fact(ask):
    first = ask("How do I start Tollhouse?")
    more = ask("How do I start Tollhouse?", first, "Tell me more")
    assert "virtual environment" in more


def test_a_new_question_in_a_conversation_is_answered(ask):
    greeting = ask("Hello")
    assert "immutable record" in ask("Hello", greeting, "What is a receipt?")


def test_unknown_topics_are_declined(ask):
    for question in PROMPT_LIST["unknown"]:
        assert "only know about Tollhouse" in ask(question)


def test_small_talk(ask):
    assert ask("Hello").startswith("Hello!")
    assert "demo model" in ask("What model is this?")


@pytest.mark.parametrize("question", ["What is Tollhouse?", "Which databases are supported?"])
def test_each_adapter_answers_in_its_own_style(ask, question):
    plain = ask(question)
    answers = {name: ask(question, adapter=name) for name in ADAPTERS}
    assert len({plain, *answers.values()}) == 4
    assert answers["formal"].endswith("Yours faithfully,\nThe Tollhouse Desk")
    assert answers["pirate"].endswith("Arr, matey! Yo ho ho!")
    assert set(json.loads(answers["json"])) == {"topic", "answer"}
    assert plain.split()[0] in answers["formal"]
