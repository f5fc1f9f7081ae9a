"""No metaphors in code, comments, pages and guides: names are the field's standard terms."""

import ast
import re
from pathlib import Path

from tests.rules.test_tree_contents import ROOT, TEXT, tracked

WORDS = re.compile(
    r"(?<![a-z])(doors?|desks?|houses?|wish(es)?|porters?|doorm[ae]n|gatehouses?|ushers?"
    r"|counting[-_ ]?houses?|lobby|landlord)(?![a-z])",
    re.IGNORECASE,
)
IN_A_NAME = re.compile(r"[a-z](Door|Desk|House|Wish|Porter|Gatehouse|Usher)(?![a-z])")
# Sentences that read as translated, in what users read: messages, help, pages and guides.
PHRASES = re.compile(
    r"(?<!there )\bis no (?!longer|more\b|other\b|later\b)[a-z.A-Z]|\ballows? to [a-z]|\bwhoever\b"
    r"|\b(fails?|failed|refused|dropped|lost) for good\b|\bno whole\b|\bwhole one\b|\bare believed\b"
    r"|\bwhat it came to\b|\bgone on with\b|\bcan be had\b",
    re.IGNORECASE,
)
STANDARD = re.compile(r"in-house|lighthouse|click-?house|warehouse|tollhouse", re.IGNORECASE)
# Text for models to learn from, results that were measured, and what is stored under its old name.
DATA = (
    "LICENSE",
    "benchmarks/results/",
    "engine/demo/",
    "training/",
    "migrations/versions/000",
    "moderation/classifiers/",
    "tests/engine/training/test_answers.py",
    "tests/moderation/test_classifier.py",
    "tests/moderation/test_kernel.py",
    "tests/rules/test_plain_words.py",
)
PRODUCT = ("core/", "gateway/", "engine/", "billing/", "moderation/", "dashboards/", "deploy/")
OLD_VALUES = {
    "CHANGELOG.md": ("`house`", "usage_house_daily", "counting-house"),
    "billing/accounts/accounts.py": (
        'DEFAULT_SELLER_ID = "house"',
    ),  # final invoices are frozen with it
    "tests/dashboards/test_revenue.py": ('seller_id="house"',),
    "tests/migrations/test_schema.py": ("usage_house_daily",),
}


def offences(name: str, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        plain = STANDARD.sub("", line)
        for old in OLD_VALUES.get(name, ()):
            plain = plain.replace(old, "")
        if WORDS.search(plain) or IN_A_NAME.search(plain):
            found.append(f"{name}:{number}: {line.strip()[:90]}")
    return found


def _checked() -> list[Path]:
    names = [path for path in tracked() if path.suffix in TEXT]
    return [path for path in names if not path.relative_to(ROOT).as_posix().startswith(DATA)]


def test_nothing_is_named_by_a_metaphor() -> None:
    found = []
    for path in _checked():
        name = path.relative_to(ROOT).as_posix()
        found += offences(name, path.read_text(errors="replace"))
    assert not found


def test_no_file_and_no_fixture_of_the_tests_is_named_by_one() -> None:
    found = [str(path) for path in _checked() if WORDS.search(STANDARD.sub("", path.name))]
    for path in _checked():
        text = path.read_text(errors="replace") if path.suffix == ".py" else ""
        for name in re.findall(r"@pytest\.fixture.*\n(?:async )?def (\w+)", text):
            if WORDS.search(name.replace("_", " ")):
                found.append(f"{path.relative_to(ROOT)}: {name}")
    assert not found


def _texts(path: Path) -> list[str]:
    """Strings of a module without its docstrings; the lines of any other file."""
    source = path.read_text(errors="replace")
    if path.suffix != ".py":
        return source.splitlines()
    nodes = list(ast.walk(ast.parse(source)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in nodes if isinstance(node, documented)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    strings = [node for node in nodes if isinstance(node, ast.Constant)]
    return [
        node.value for node in strings if isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_what_users_read_is_idiomatic() -> None:
    found = []
    for path in _checked():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(PRODUCT) or (name.startswith("docs/") or "/" not in name):
            found += [f"{name}: {text}" for text in _texts(path) if PHRASES.search(text)]
    assert not found


def test_a_translated_phrase_is_found_and_an_idiomatic_one_is_not() -> None:
    wrong = (
        "x is no number.",
        "is no GGUF file",
        "settings do not allow to store",
        "failed for good",
    )
    assert all(PHRASES.search(text) for text in wrong)
    right = (
        "There is no model x.",
        "is no longer listed",
        "is not a number",
        "a fix for good reasons",
    )
    assert not [text for text in right if PHRASES.search(text)]


def test_a_metaphor_is_found_and_a_standard_word_is_not() -> None:
    wrong = ("at the door", "own_house = 1", "class SafetyDesk:", "the Counting-House", "a wish")
    assert all(offences("x.py", line) for line in wrong)
    right = ("Tollhouse", "in-house", "a ClickHouse table", "warehouse", "indoors", "TOLLHOUSE_X")
    assert not [line for line in right if offences("x.py", line)]
