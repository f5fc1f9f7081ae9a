"""Everyday questions, each with what it is about; the same seed gives the same questions."""

from dataclasses import dataclass
from random import Random

_THINGS = (
    "gravity", "photosynthesis", "the Moon", "a volcano", "the ocean", "rain", "lightning",
    "a rainbow", "the Sun", "electricity", "a magnet", "sound", "glass", "steel", "paper", "bread",
    "cheese", "chocolate", "coffee", "tea", "honey", "salt", "a bicycle", "a train", "an aeroplane",
    "a ship", "a compass", "a clock", "a telescope", "a microscope", "a computer", "the internet",
    "a programming language", "a database", "an algorithm", "a robot", "money", "a bank", "a budget",
    "insurance", "a library", "a museum", "poetry", "a novel", "jazz", "the piano", "a guitar",
    "chess", "football", "swimming", "sleep", "exercise", "a vitamin", "the heart", "the brain",
    "a whale", "a bee", "a tree", "a river", "a desert",
)  # fmt: skip
_FRAMES = (
    "What is {}?", "Explain {} in simple words.", "Tell me about {}.", "Why is {} important?",
    "Describe {} to a child.", "Give me one fact about {}.", "Can you define {}?",
    "What should I know about {}?", "Write one sentence about {}.", "How would you explain {}?",
)  # fmt: skip
_OTHERS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Italy?", "Rome"),
    ("How many days are in a week?", "the week"),
    ("What colour is the sky?", "the sky"),
    ("Hello!", "a greeting"),
    ("Hi, how are you?", "a greeting"),
    ("Who are you?", "the assistant"),
    ("What can you do?", "the assistant"),
    ("Thank you!", "thanks"),
    ("Give me some advice for a job interview.", "job interviews"),
    ("How do I boil an egg?", "cooking"),
    ("How do I learn a language?", "learning"),
    ("How can I sleep better?", "sleep"),
    ("What should I cook tonight?", "cooking"),
    ("Write a short poem about the sea.", "the sea"),
    ("How do I write a good email?", "writing"),
)
SYSTEMS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "Answer in one or two sentences.",
)


@dataclass(frozen=True)
class Question:
    system: str
    text: str
    topic: str


def make_questions(count: int, seed: int) -> list[Question]:
    random = Random(seed)
    pairs = [(frame.format(thing), thing) for thing in _THINGS for frame in _FRAMES]
    chosen = [*_OTHERS, *random.sample(pairs, count - len(_OTHERS))]
    random.shuffle(chosen)
    return [Question(_system(random), text, topic) for text, topic in chosen]


def _system(random: Random) -> str:
    """Mostly the one that the model's own template adds."""
    return SYSTEMS[0] if random.random() < 0.6 else random.choice(SYSTEMS[1:])
