"""Generates system prompts: none, short, or long ones unrelated to the question."""

import json
from random import Random

from training.demo.exchanges import table
from training.demo.facts import load_facts

LETTERS = "aaabcdeeeefghiiijklmnooopqrsttuuvwxyz"


def sentence(random: Random) -> str:
    parts = table("preambles")
    subject, other = random.sample(parts["subjects"], 2)
    text = f"{subject} {random.choice(parts['verbs'])} {other} {random.choice(parts['endings'])}."
    return text[0].upper() + text[1:]


def tool(random: Random) -> str:
    parts = table("preambles")
    fields = random.sample(parts["fields"], random.randint(1, 4))
    schema = {
        "name": random.choice(parts["tools"]),
        "description": sentence(random),
        "parameters": {field: {"type": random.choice(("string", "integer"))} for field in fields},
    }
    return json.dumps(schema, indent=random.choice((None, None, 2)))


def rules(random: Random) -> str:
    chosen = random.sample(table("preambles")["rules"], random.randint(2, 8))
    mark = random.choice(("- ", "* ", "", "{n}. "))
    return "\n".join(mark.replace("{n}", str(n + 1)) + rule for n, rule in enumerate(chosen))


def notes(random: Random) -> str:
    return " ".join(sentence(random) for _ in range(random.randint(2, 8)))


def jumble(random: Random) -> str:
    """Words in random order, so that the model learns to ignore any wording of a preamble."""
    words = [word for _ in range(random.randint(2, 6)) for word in sentence(random).split()]
    words += [str(random.randint(0, 9999)) for _ in range(random.randint(0, 6))]
    words += [invented_word(random) for _ in range(random.randint(0, 12))]
    random.shuffle(words)
    return " ".join(words)


def invented_word(random: Random) -> str:
    return "".join(random.choices(LETTERS, k=random.randint(2, 9)))


def quotation(random: Random) -> str:
    """A fact that is unrelated to the question."""
    fact = random.choice(load_facts())
    return random.choice((f"{fact.title}: {fact.answers[0]}", fact.more, fact.short))


def section(random: Random) -> str:
    body = random.choice((rules, rules, notes, notes, notes, tool, jumble, quotation))(random)
    if random.random() < 0.5:
        return body
    name = random.choice(table("preambles")["headings"])
    return f"{random.choice(('## ', '# ', '', '### '))}{name}\n{body}"


def opening(random: Random) -> str:
    parts = table("preambles")
    role, company = random.choice(parts["roles"]), random.choice(parts["companies"])
    return random.choice((
        f"You are {role} for {company}.", f"You are {role} of {company}. Be polite.",
        f"You work as {role} at {company}, and you help its customers.",
        f"Act as {role} who works for {company}.", f"{company}: you are {role}.",
    ))  # fmt: skip


def short_preamble(random: Random) -> str:
    if random.random() < 0.5:
        return str(random.choice(table("preambles")["plain"]))
    text = opening(random)
    return text if random.random() < 0.5 else f"{text} {rules(random)}"


def long_preamble(random: Random, sections: int) -> str:
    return "\n\n".join([opening(random), *(section(random) for _ in range(sections))])


def preamble(random: Random) -> str:
    """A system prompt; empty in half of the cases, long in one of forty."""
    draw = random.random()
    if draw < 0.55:
        return ""
    if draw < 0.89:
        return short_preamble(random)
    if draw < 0.975:
        return long_preamble(random, random.randint(1, 3))
    return long_preamble(random, 4 + int(26 * random.random() ** 2))
