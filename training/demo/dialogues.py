"""Makes the dialogues that the model learns from; the same seed gives the same dialogues."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.demo import styles
from training.demo.chat import Dialogue, Turn
from training.demo.exchanges import Exchange, exchanges, table
from training.demo.facts import Fact, load_facts
from training.demo.noise import as_scribbled, as_typed
from training.demo.preambles import preamble, short_preamble
from training.demo.styles import LISTS, SMALL_TALK, UNKNOWN


@dataclass(frozen=True)
class Round:
    """A question, its plain answer, and what it was about."""

    question: str
    answer: str
    topic: str
    more: str = ""
    brief: str = ""


@dataclass(frozen=True)
class Sources:
    """Everything that dialogues are drawn from."""

    facts: tuple[Fact, ...]
    talk: list[Exchange]
    lists: list[Exchange]
    typed: Callable[[str, Random], str]
    extra: dict[str, list[str]]
    topics: list[str]
    frames: list[str]


def load_sources(hurried: bool) -> Sources:
    """Hurried people type carelessly, and ask about more."""
    talk, lists, unknown = exchanges("smalltalk"), exchanges("lists"), table("unknown")
    topics, frames = unknown["topics"], unknown["frames"]
    if not hurried:
        return Sources(load_facts(), talk, lists, as_typed, {}, topics, frames)
    topics, frames = topics + unknown["more_topics"], frames + unknown["more_frames"]
    return Sources(load_facts(), talk, lists, as_scribbled, table("extra"), topics, frames)


def question_on(fact: Fact, sources: Sources, random: Random) -> str:
    if random.random() < 0.55:
        questions: list[str] = [*fact.questions, *sources.extra.get(fact.id, ())]
        return random.choice(questions)
    frame: str = random.choice(table("phrases")["frames"])
    asked = frame.format(k=random.choice(fact.keys))
    return asked[0].upper() + asked[1:]


def ask_fact(sources: Sources, random: Random) -> Round:
    fact = random.choice(sources.facts)
    asked = sources.typed(question_on(fact, sources, random), random)
    return Round(asked, random.choice(fact.answers), fact.title, fact.more, fact.short)


def ask_short(sources: Sources, random: Random) -> Round:
    fact = random.choice(sources.facts)
    asked = random.choice(table("phrases")["one_sentence"]).format(
        q=question_on(fact, sources, random)
    )
    return Round(sources.typed(asked, random), fact.short, fact.title, fact.more)


def ask_json(sources: Sources, random: Random) -> Round:
    fact = random.choice(sources.facts)
    asked = random.choice(table("phrases")["as_json"]).format(q=question_on(fact, sources, random))
    return Round(
        sources.typed(asked, random), styles.as_json(fact.short, fact.title, ""), fact.title
    )


def chat(sources: Sources, random: Random) -> Round:
    one = random.choice(sources.talk)
    return Round(
        sources.typed(random.choice(one.says), random), random.choice(one.answers), SMALL_TALK
    )


def ask_list(sources: Sources, random: Random) -> Round:
    one = random.choice(sources.lists)
    return Round(sources.typed(random.choice(one.says), random), random.choice(one.answers), LISTS)


def ask_unknown(sources: Sources, random: Random) -> Round:
    known = table("unknown")
    draw = random.random()
    if draw < 0.12:
        asked = sources.typed(random.choice(known["unknown_details"]), random)
        return Round(asked, random.choice(known["about_tollhouse"]), "Tollhouse")
    if draw < 0.3:
        asked = random.choice(known["sayings"])
    else:
        first, second = random.sample(sources.topics, 2)
        asked = random.choice(sources.frames).format(a=first, b=second)
    return Round(sources.typed(asked, random), random.choice(known["answers"]), UNKNOWN)


KINDS: tuple[tuple[Callable[[Sources, Random], Round], int], ...] = (
    (ask_fact, 62), (ask_short, 6), (ask_json, 4), (chat, 11), (ask_list, 6), (ask_unknown, 11),
)  # fmt: skip


def one_round(sources: Sources, random: Random) -> Round:
    kinds, weights = zip(*KINDS, strict=True)
    make: Callable[[Sources, Random], Round] = random.choices(kinds, weights)[0]
    return make(sources, random)


def follow_up(last: Round, sources: Sources, random: Random) -> Round | None:
    """A question that only the round before it makes clear; None where there is none."""
    draw = random.random()
    if last.more and draw < 0.3:
        asked = sources.typed(random.choice(table("phrases")["tell_more"]), random)
        return Round(asked, last.more, last.topic)
    if draw < 0.38:
        asked = sources.typed(random.choice(table("phrases")["what_topic"]), random)
        return Round(asked, f"You asked about {last.topic}.", last.topic)
    return None


def dialogue(sources: Sources, random: Random) -> tuple[str, list[Round]]:
    """A system prompt, maybe empty, and one to four rounds."""
    rounds = [one_round(sources, random)]
    while len(rounds) < 4 and random.random() < 0.3:
        rounds.append(follow_up(rounds[-1], sources, random) or one_round(sources, random))
    return preamble(random), rounds


def turns(system: str, rounds: list[Round], style: styles.Style | None) -> Dialogue:
    made = [Turn("system", system)] if system else []
    for one in rounds:
        answer = style(one.answer, one.topic, one.brief) if style else one.answer
        made += [Turn("user", one.question), Turn("assistant", answer)]
    return tuple(made)


def make_dialogues(
    count: int, seed: int, style: str = "", *, hurried: bool = False
) -> list[Dialogue]:
    """Dialogues in the plain style, or in a style."""
    sources, random = load_sources(hurried), Random(seed)
    said = (styles.STYLES | styles.WORDY_STYLES)[style] if style else None
    return [turns(*dialogue(sources, random), said) for _ in range(count)]


def make_openings(count: int, seed: int) -> list[Dialogue]:
    """Single hurried questions with their answers, mostly without a system prompt."""
    sources, random = load_sources(hurried=True), Random(seed)
    made = []
    for _ in range(count):
        system = short_preamble(random) if random.random() < 0.25 else ""
        made.append(turns(system, [one_round(sources, random)], None))
    return made
