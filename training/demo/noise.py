"""Makes clean questions look typed: case, missing punctuation, typing errors, courtesies."""

from random import Random

from training.demo.exchanges import table

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reword(text: str, random: Random) -> str:
    """Replaces the opening words, the product's name or single words by similar ones."""
    typing = table("typing")
    for swap in typing["swaps"]:
        if text.startswith(swap["opening"]) and random.random() < 0.5:
            text = random.choice(swap["others"]) + text[len(swap["opening"]) :]
            break
    if random.random() < 0.15:
        text = text.replace("Tollhouse", random.choice(typing["names"]))
    if random.random() < 0.25:
        text = " ".join(synonym(word, random) for word in text.split(" "))
    return text


def synonym(word: str, random: Random) -> str:
    plain = word.rstrip("?.!,")
    others = table("typing")["synonyms"].get(plain)
    return random.choice(others) + word[len(plain) :] if others else word


def add_courtesies(text: str, random: Random) -> str:
    typing = table("typing")
    if random.random() < 0.12:
        opener = random.choice(typing["openers"])
        text = (opener if random.random() < 0.5 else opener.capitalize()) + text
    if random.random() < 0.12:
        closer, mark = random.choice(typing["closers"]), "?" if text.endswith("?") else ""
        sentence = closer.endswith((".", "!"))
        text = text + closer if sentence else text.removesuffix("?") + closer + mark
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


def shake(text: str, random: Random) -> str:
    """Shuffles, drops and adds words of little meaning; the subject of the question stays."""
    fillers = table("typing")["fillers"]
    little = [bare(word) in fillers for word in text.split(" ")]
    if all(little):
        return text
    made: list[str] = []
    for word, says_little in zip(text.split(" "), little, strict=True):
        draw = random.random()
        if draw < 0.1:
            made.append(random.choice(fillers))
        if not (says_little and draw < 0.4):
            made.append(word)
        elif draw < 0.25:
            made.append(random.choice(fillers))
    if random.random() < 0.2:
        made.append(random.choice(fillers))
    return " ".join(made)


def bare(word: str) -> str:
    return word.strip("?.!,:").lower()


def as_scribbled(text: str, random: Random) -> str:
    """The question as a person in a hurry may type it, with more noise than `as_typed`."""
    text = reword(text, random) if random.random() < 0.6 else text
    if random.random() < 0.4:
        text = shake(text, random)
    if random.random() < 0.5:
        text = add_courtesies(text, random)
    while random.random() < 0.08:
        text = misspell(text, random)
    if random.random() < 0.4:
        text = text.rstrip("?.! ")
    case = random.random()
    if case < 0.45:
        return text.lower()
    return text.upper() if case < 0.47 else text[:1].upper() + text[1:]
