"""`tollhouse provider parse` reads an answer in each form that it is recorded in."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from tests.gateway.engines.ports.answers import CALLS, MADE, TEXT, THOUGHT, Made

USAGE = ("input", "cache_read", "cache_write", "output", "reasoning")


def parse(path: Path, made: Made, *options: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["provider", "parse", "--port", made.name, *options, "--json", str(path)]) == 0
    return json.loads(capsys.readouterr().out)


def forms(made: Made) -> dict[str, bytes]:
    stream = b"".join(made.stream(True, 0).body)
    found = {"stream": stream}
    if made.name == "bedrock":
        return {**found, "base64": base64.encodebytes(stream)}
    lines = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    return {**found, "lines": b"\n".join(lines), "list": b"[" + b",".join(lines) + b"]"}


@pytest.mark.parametrize("name", MADE)
def test_every_form_says_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, path = MADE[name], tmp_path / "recorded"
    path.write_bytes(bytes(made.whole(True).body))  # type: ignore[arg-type]
    whole = parse(path, made, capsys=capsys)
    assert (whole["text"], whole["reasoning"], whole["stop_reason"]) == (
        TEXT,
        THOUGHT,
        "tool_calls",
    )
    assert [(each["name"], each["arguments"]) for each in whole["tool_calls"]] == [
        ("weather", arguments) for _, arguments in CALLS
    ]
    usage, expected = whole["usage"], made.usage
    assert set(USAGE) <= usage.keys()
    prompt = usage["input"] + usage["cache_read"] + usage["cache_write"]
    assert (prompt, usage["cache_read"]) == (expected.prompt, expected.read)
    assert (usage["cache_write"], usage["output"]) == (expected.written, expected.output)
    for form, data in forms(made).items():
        path.write_bytes(data)
        assert parse(path, made, "--stream", capsys=capsys) == whole, form


@pytest.mark.parametrize(
    "data", [b"", b"<html>", b"[1]", b"{}", b'{"error": {"message": "no"}}', b"\xff\xfe"]
)
@pytest.mark.parametrize("name", ["anthropic", "gemini", "bedrock", "openai", "cohere"])
def test_what_is_no_answer_is_said(
    name: str, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recorded"
    path.write_bytes(data)
    for options in ((), ("--stream",)):
        code = main(["provider", "parse", "--port", name, *options, str(path)])
        if code:
            assert "Traceback" not in capsys.readouterr().err
        else:  # a stream whose only event says nothing
            assert options
