"""The shipped demo model says what is true of Tollhouse, in whatever way it is asked."""

import json

from engine.demo.paths import ADAPTERS, PROMPTS
from tests.engine.training.conftest import conversation

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


def test_ten_questions_hold_the_expected_facts(ask_all):
    answers = ask_all([conversation(question) for question in TEN_QUESTIONS])
    missing = [
        (fact, answer)
        for answer, facts in zip(answers, TEN_QUESTIONS.values(), strict=True)
        for fact in facts
        if fact not in answer
    ]
    assert not missing


def test_a_long_system_prompt_about_something_else_does_not_distract(ask_all):
    prompts = [tenant["system"] for tenant in PROMPT_LIST["tenants"]]
    asked = [conversation("What is a receipt?", system=prompt) for prompt in prompts]
    assert [answer for answer in ask_all(asked) if "immutable record" not in answer] == []


def test_tell_me_more_goes_on_about_the_same_fact(ask):
    first = ask("Who is Tollhouse for?")
    more = ask("Who is Tollhouse for?", first, "Tell me more")
    assert "the SDK that they already have" in more


def test_a_new_question_in_a_conversation_is_answered(ask):
    greeting = ask("Hello")
    assert "immutable record" in ask("Hello", greeting, "What is a receipt?")


def test_unknown_topics_are_declined(ask_all):
    answers = ask_all([conversation(question) for question in PROMPT_LIST["unknown"]])
    assert [each for each in answers if "only know about Tollhouse" not in each] == []


def test_small_talk(ask_all):
    greeting, model = ask_all([conversation("Hello"), conversation("What model is this?")])
    assert greeting.startswith("Hello!")
    assert "demo model" in model


def test_each_adapter_answers_in_its_own_style(ask_all):
    questions = ["What is Tollhouse?", "Which databases are supported?"]
    asked = [conversation(question) for question in questions]
    made = {name: ask_all(asked, adapter=name) for name in ("", *ADAPTERS)}
    for number in range(len(questions)):
        answers = {name: each[number] for name, each in made.items()}
        assert len(set(answers.values())) == 4
        assert answers["formal"].endswith("Yours faithfully,\nThe Tollhouse Team")
        assert answers["pirate"].endswith("Arr, matey! Yo ho ho!")
        assert set(json.loads(answers["json"])) == {"topic", "answer"}
        assert answers[""].split()[0] in answers["formal"]
