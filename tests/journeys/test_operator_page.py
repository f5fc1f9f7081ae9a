"""The commands of docs/operator.md, as they stand there: those of its blocks run against a gateway that
serves, those in its sentences exist with the options that they are shown with."""

import argparse
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from core.settings import setting_names
from engine.worker.options import parse
from gateway.catalog.upstreams import read_upstreams
from gateway.cli.main import command_module, command_names
from tests.gateway.deployment import running_deployment
from tests.journeys.deployments import ROOT, Command

PAGE = (ROOT / "docs/operator.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


IN_BLOCKS = [line for block in _blocks("sh") for line in block.splitlines()]
IN_SENTENCES = sorted({*re.findall(r"`(tollhouse [^`]+)`", PAGE)})


def test_settings_of_the_page_exist() -> None:
    prefixes = {each.removesuffix("_") for each in re.findall(r"TOLLHOUSE_\w+_(?=\*)", PAGE)}
    assert {*re.findall(r"TOLLHOUSE_[A-Z0-9_]+[A-Z0-9]", PAGE)} - prefixes <= {*setting_names()}


def test_the_entry_of_an_upstream_is_one() -> None:
    [block] = [each for each in _blocks("json") if '"upstream_model"' in each]
    [entry] = read_upstreams(block)
    assert entry.model == json.loads(block)[0]["model"]


@pytest.mark.parametrize("line", IN_SENTENCES)
def test_a_command_in_a_sentence_exists(line: str) -> None:
    """A sentence may name a command without its arguments; what it shows has to be there."""
    _, command, *words = shlex.split(line)
    assert command in command_names()
    if command == "engine":
        accepted = {option for option in words if option.startswith("--")}
        shown = parse(["--model", "m"]).config
        for option in accepted - {"--model"}:
            assert hasattr(shown, option.removeprefix("--").replace("-", "_")), option
        return
    parser = argparse.ArgumentParser()
    command_module(command).configure(parser)
    for word in words:
        if word.startswith("--"):
            assert word in parser._option_string_actions, line
            continue
        verbs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        if verbs and word in verbs[0].choices:
            parser = verbs[0].choices[word]
        else:
            assert not verbs, f"{line}: {command} has no {word}"


def test_the_commands_of_blocks_work_beside_a_gateway(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as gateway:
        port = gateway.url.rpartition(":")[2]
        command = Command(tmp_path, {"TOLLHOUSE_PORT": port})
        for line in IN_BLOCKS:
            name, *words = shlex.split(line)
            assert name == "tollhouse"
            done = command.run(*words)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if "--json" in words:
                json.loads(done.stdout)


def test_modules_that_the_page_starts_are_there() -> None:
    named = re.findall(r"python -m ([\w.]+)", PAGE)
    assert named
    assert all(find_spec(name) for name in named)
