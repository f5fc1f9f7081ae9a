"""Makes a clean question look as people type it: case, missing marks, typing errors, courtesies."""

from random import Random

OPENERS = (
    "hi, ", "hello, ", "hey, ", "please tell me: ", "quick question: ", "question: ", "ok, ",
    "so, ", "can you tell me, ", "i was wondering, ", "sorry, ", "one more thing: ", "and ",
    "help: ", "could you explain, ", "i need to know: ", "my boss asks: ", "hi there! ",
)  # fmt: skip
CLOSERS = (
    " please", " thanks", " thank you", " exactly", " in practice", " for my team",
    " in our company", " on my laptop", " for a start-up", " in short", " again",
    " in simple words", " by default", " these days", " for our customers", " I am new here.",
)  # fmt: skip
SWAPS = (
    ("What is ", ("What's ", "What exactly is ", "Tell me what is ", "Define ", "Explain ")),
    ("What are ", ("What exactly are ", "Explain ", "Tell me about ")),
    ("How do I ", ("How can I ", "How to ", "How would I ", "What is the way to ", "How do we ")),
    ("How does ", ("In what way does ", "Explain how does ", "How exactly does ")),
    ("Which ", ("What ", "Tell me which ")),
    ("Can I ", ("Is it possible to ", "May I ", "Could I ", "Can we ")),
    ("Does ", ("Do you know if ", "Tell me, does ")),
    ("Where ", ("Tell me where ", "In which place ")),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reword(text: str, random: Random) -> str:
    """Replaces the opening words, or the product's name, by another that means the same."""
    for opening, others in SWAPS:
        if text.startswith(opening) and random.random() < 0.5:
            text = random.choice(others) + text[len(opening) :]
            break
    if random.random() < 0.15:
        name = random.choice(("it", "this", "this product", "the system", "tollhouse", "you"))
        text = text.replace("Tollhouse", name)
    return text


def add_courtesies(text: str, random: Random) -> str:
    if random.random() < 0.12:
        opener = random.choice(OPENERS)
        text = (opener if random.random() < 0.5 else opener.capitalize()) + text
    if random.random() < 0.12:
        mark = "?" if text.endswith("?") else ""
        text = text.removesuffix("?") + random.choice(CLOSERS) + mark
    return text


def misspell(text: str, random: Random) -> str:
    """Swaps, drops, doubles or replaces one letter."""
    if len(text) < 6:
        return text
    at = random.randrange(1, len(text) - 2)
    match random.randrange(4):
        case 0:
            return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        case 1:
            return text[:at] + text[at + 1 :]
        case 2:
            return text[:at] + text[at] + text[at:]
        case _:
            return text[:at] + random.choice(LETTERS) + text[at + 1 :]


def drop_word(text: str, random: Random) -> str:
    words = text.split(" ")
    if len(words) < 5:
        return text
    del words[random.randrange(len(words) - 1)]
    return " ".join(words)


def as_typed(text: str, random: Random) -> str:
    """The question as a person may type it; the same random state gives the same text."""
    text = add_courtesies(reword(text, random), random)
    if random.random() < 0.06:
        text = drop_word(text, random)
    while random.random() < 0.1:
        text = misspell(text, random)
    if random.random() < 0.2:
        text = text.rstrip("?.! ")
    case = random.random()
    if case < 0.25:
        return text.lower()
    return text.upper() if case < 0.28 else text
