"""`max_tokens` of a chat, from its body to the engine: each file and record that holds it is one more
place to follow, and to forget."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_RECORDS = 8, 4
NAMES = {"max_tokens", "max_output_tokens", "max_completion_tokens"}
WALK = [
    "gateway/inference/chat/request.py",
    "gateway/inference/request.py",
    "gateway/prompts/truncation.py",
    "gateway/prompts/prompt.py",
    "gateway/admission/request.py",
    "gateway/routing/router.py",
    "gateway/upstreams/sampling.py",
]
RECORDS = ["ChatBody", "InferenceRequest", "Prompt", "AdmissionRequest"]
# The other surfaces, each of which fills the same InferenceRequest; other kinds of upstreams; and what
# asks for a fixed number of tokens.
BESIDE = {
    "gateway/inference/completions/request.py",
    "gateway/inference/embeddings/request.py",
    "gateway/inference/messages/request.py",
    "gateway/inference/responses/request.py",
    "gateway/inference/responses/response.py",
    "gateway/inference/scores/request.py",
    "gateway/upstreams/openai_body.py",
    "gateway/upstreams/upstream_usage.py",
    "gateway/upstreams/fake.py",
    "gateway/api/moderations.py",
    "gateway/api/tokenize.py",
    "gateway/media/context.py",
    "gateway/screening/second_opinions.py",
}
OTHER_BODIES = {"CompletionBody", "MessagesBody", "ResponsesBody"}


def names_it(source: str) -> bool:
    """Whether code names the parameter: texts and comments do not count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            return True
        if isinstance(node, ast.keyword | ast.arg) and node.arg in NAMES:
            return True
        if isinstance(node, ast.Name) and node.id in NAMES:
            return True
    return False


def _sources() -> dict[str, str]:
    paths = sorted((ROOT / "gateway").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_the_walk_passes_few_files() -> None:
    found = {name for name, source in _sources().items() if names_it(source)}
    assert found - BESIDE == set(WALK)
    assert len(WALK) <= MOST_FILES
    assert found >= BESIDE, "a file that no longer names it leaves the list"


def test_the_walk_passes_few_records() -> None:
    holders = []
    for source in _sources().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                if NAMES & {field.id for field in fields if isinstance(field, ast.Name)}:
                    holders.append(node.name)
    assert set(holders) - OTHER_BODIES == set(RECORDS)
    assert len(RECORDS) <= MOST_RECORDS


def test_one_more_file_is_found() -> None:
    assert names_it("def f(max_tokens): ...") and names_it("g(max_output_tokens=1)")
    assert names_it("x = request.max_tokens") and not names_it("x = 'max_tokens'")
