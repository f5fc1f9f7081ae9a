"""Runs what README.md tells a reader to type, word for word, beside the server that it told to start."""

import re
import shlex
from pathlib import Path

from shell import Failed, Shell, say

# Started already, started for good, or for the machines of production only.
_NOT_HERE = ("make", "export", "tollhouse serve", "tollhouse engine", "tollhouse worker")
_VARIABLE = re.compile(r"^[A-Z_]+=\S* ")
_ADDRESS = "http://127.0.0.1:8000"


def follow(readme: Path, shell: Shell, tollhouse: Path, python: Path, url: str) -> None:
    """`python` has the openai SDK. Only the address is another than the README's."""
    text = readme.read_text()
    lines = commands(text)
    if len(lines) < 10:
        raise Failed(f"{readme.name} has only {len(lines)} commands to run")
    for line in lines:
        words = shlex.split(line)
        shell.run(tollhouse, *words[1:])
    source = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    if _ADDRESS not in source:
        raise Failed(f"{readme.name} has no Python that asks {_ADDRESS}")
    said = shell.run(python, "-c", source.replace(_ADDRESS, url))
    if "Usage(" not in said:
        raise Failed(f"the Python of {readme.name} printed no usage:\n{said}")
    say(f"  {said.rstrip()[:200]}")


def commands(text: str) -> list[str]:
    """The lines of its shell blocks that a reader can run now, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    plain = [line for line in lines if line and not _VARIABLE.match(line)]
    return [line for line in plain if not line.startswith(_NOT_HERE)]
