"""The README and the guides are run: commands on a running gateway, Python as it stands; paths, commands
and settings are checked against the tree. A fence `python listing` quotes a file and is not run;
`tests/engine/models/test_contributor_example.py` compares it with the file.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.settings import setting_names
from gateway.cli.main import command_names, main

ROOT = Path(__file__).parents[2]
GUIDES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("customer", "admin", "finance", "operator", "contributor")),
)
# Started for good, or on machines that only production has: their options are checked, not run.
RUN_FOR_GOOD = ("serve", "engine", "worker")
LITELLM_LIST = {
    "claude-sonnet-4-5": {"input_cost_per_token": 3e-06, "output_cost_per_token": 1.5e-05}
}


def text_of(guide: str) -> str:
    return (ROOT / guide).read_text()


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(guide), re.DOTALL)


def shell_lines(guide: str) -> list[str]:
    lines = [
        line.partition(" #")[0].strip()
        for block in blocks(guide, "sh")
        for line in block.splitlines()
    ]
    return [line for line in lines if line]


def write_price_lists(folder: Path) -> None:
    """The files that the guide of finance imports: a list of LiteLLM's form, and the guide's own."""
    (folder / "model_prices_and_context_window.json").write_text(json.dumps(LITELLM_LIST))
    (own,) = (each for each in blocks("docs/finance.md", "json") if '"prices"' in each)
    (folder / "prices.json").write_text(own)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A running gateway: its environment, and its address under URL."""
    data = tmp_path_factory.mktemp("readme")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    environment |= {"TOLLHOUSE_DATA_DIR": str(data / "data"), "TOLLHOUSE_PORT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli.main", "serve"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    ready = json.loads(next(line for line in process.stdout if line.startswith("{")))
    port = ready["url"].rpartition(":")[2]
    yield environment | {"TOLLHOUSE_PORT": port, "URL": ready["url"], "WHERE": str(data)}
    process.terminate()
    process.wait(30)
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_run_as_they_are_written(
    guide: str,
    home: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith("TOLLHOUSE_")]:
        monkeypatch.delenv(name)
    for name in ("TOLLHOUSE_DATA_DIR", "TOLLHOUSE_PORT"):
        monkeypatch.setenv(name, home[name])
    monkeypatch.chdir(home["WHERE"])
    write_price_lists(Path(home["WHERE"]))
    for line in shell_lines(guide):
        words = [w for w in shlex.split(line) if not re.match(r"TOLLHOUSE_\w+=", w)]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            continue
        if words[0] == "export":
            assert words[1:] or line.split()[1].partition("=")[0] in setting_names(), line
            continue
        assert words[0] == "tollhouse" and words[1] in command_names(), line
        if words[1] in RUN_FOR_GOOD:
            continue
        if words[1] == "demo":
            words[-1] = "3"
        capsys.readouterr()
        assert main(words[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
        if "--json" in words:
            json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("guide", [guide for guide in GUIDES if blocks(guide, "python")])
def test_the_python_runs_as_it_is_written(guide: str, home: dict[str, str]) -> None:
    source = "\n".join(blocks(guide, "python"))
    assert "http://127.0.0.1:8000" in source
    result = subprocess.run(
        [sys.executable, "-c", source.replace("http://127.0.0.1:8000", home["URL"])],
        cwd=home["WHERE"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 20


@pytest.mark.parametrize("guide", GUIDES)
def test_every_fence_has_a_language_that_is_checked(guide: str) -> None:
    opened = re.findall(r"^```(.*)$", text_of(guide), re.MULTILINE)[::2]
    assert {*opened} <= {"sh", "python", "python listing", "json", "yaml", ""}, opened


@pytest.mark.parametrize("guide", GUIDES)
def test_every_path_command_and_setting_that_it_names_exists(guide: str) -> None:
    text = text_of(guide)
    named = set(re.findall(r"`([\w./-]+/[\w./-]*|[A-Z]+\.md)`", text))
    named = {
        name for name in named if name.split("/")[0] in os.listdir(ROOT) or name.endswith(".md")
    }
    assert not sorted(name for name in named if not (ROOT / name).exists())
    for name in re.findall(r"`?tollhouse ([a-z]+)", text):
        assert name in command_names(), name
    for name in re.findall(r"TOLLHOUSE_[A-Z_]+", text):
        assert name in setting_names() or name == "TOLLHOUSE_ENV_FILE", name
